from __future__ import annotations

import copy
import json
import pickle
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compared import assert_same_training
from distributed import run_ranks
from lightning import seed_everything
from tiny import Decoder, decoder_batch, meta_model, tiny_config, tiny_model
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForSequenceClassification

from lightning_autotp.capture import capture as capturing
from lightning_autotp.capture.capture import (
    CaptureError,
    capture,
    capture_local,
    language_model_inputs,
    meta_copy,
)
from lightning_autotp.capture.kept_outside import KeptOutside
from lightning_autotp.capture.synthetic_draws import HIGH, LOW
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.operators.graph import KEPT, OPAQUE
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.pipeline import make_plan
from lightning_autotp.proving import local_sizes as localize


def test_boundaries_surround_every_module() -> None:
    graph = capture(Decoder(), decoder_batch())
    crossed = {str(operator.boundary) for operator in graph.operators if operator.boundary}
    assert {"norm.in[0][0]", "norm.out", "q.in[0][0]", "q.out", "table.out", "(root).out"} <= crossed
    linears = [operator for operator in graph.operators if operator.name == "aten.linear.default"]
    assert [operator.module for operator in linears] == ["q", "k", "v", "o", "gate", "up", "down", "classes"]
    assert all(operator.layer == "Linear" and "tiny.py" in operator.source for operator in linears)


class Choosing(nn.Module):
    """Each row goes through the expert that it chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen, result = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if rows.shape[0]:
                result = result.index_add(0, rows, expert(x[rows]))
        return result


class Skipping(nn.Module):
    """Skips layers by torch's and Python's random numbers, and takes as many features as numpy's say."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.crop, self.last = nn.Module(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            drawn = torch.rand(1).item() if at % 2 else random.random()
            if self.training and drawn < 0.5:
                continue
            x = x + layer(x)
        few = int(np.random.randint(1, 5))
        result: Tensor = self.last(x)[:few]
        return result


def test_random_numbers_are_synthetic_and_both_ways_traced() -> None:
    graphs = []
    for seed in (0, 1):
        model = Skipping()
        seed_everything(seed, verbose=False)
        before = torch.get_rng_state(), random.getstate(), pickle.dumps(np.random.get_state())
        graphs.append(capture(model, torch.zeros(7, 8)))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), pickle.dumps(np.random.get_state())) == before[1:]
    graph, other = graphs
    assert graph.operators == other.operators
    assert graph.draws == (HIGH, LOW)
    assert graph.value_dependent == {""}
    ran = [run.module for run in graph.runs]
    assert ran == [*(f"layers.{at}" for at in range(4)), "last", "", "last", ""]
    evaluated = capture(Skipping().eval(), torch.zeros(7, 8), training=False)
    assert (evaluated.draws, evaluated.value_dependent, evaluated.varying) == ((HIGH,), frozenset(), {""})


def test_logits_stay_divided_with_several_batches() -> None:
    batch = {"input_ids": torch.zeros(5, 7, dtype=torch.long), "labels": torch.zeros(5, 7, dtype=torch.long)}
    plan, _ = make_plan(meta_model("llama"), 2, example_inputs=[batch, batch])
    (shown,) = [change for change in plan.conversions if change.module == "lm_head"]
    assert isinstance(shown.source, Shard)
    assert shown.source == shown.target


def test_what_the_trace_asks_of_tensors_is_no_call_of_the_models_code() -> None:
    graph = capture(Choosing(), torch.zeros(7, 8))
    assert len(graph.inspections) == 2
    assert {call.site.file for call in (*graph.calls, *graph.inspections)} == {__name__, nn.Linear.__module__}


def test_model_is_not_touched() -> None:
    model = tiny_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    capture(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_tied_parameters_are_one_tensor() -> None:
    graph = capture(meta_model("gemma2"))
    users = [
        operator.name
        for operator in graph.operators
        for tensor in operator.inputs
        if graph.parameters.get(tensor, "").endswith("embed_tokens.weight")
    ]
    assert users == ["aten.embedding.default", "aten.linear.default"]


def test_what_depends_on_no_parameter_is_static() -> None:
    model = meta_model("llama")
    batch = language_model_inputs(model)
    batch["attention_mask"] = torch.ones(batch["input_ids"].shape, dtype=torch.long)
    batch["attention_mask"][:, -1] = 0
    graph = capture(model, batch)
    attention = next(o for o in graph.operators if o.name == "aten.scaled_dot_product_attention.default")
    assert graph.tensors[attention.argument("attn_mask").tensor].is_static
    assert not graph.tensors[attention.outputs[0]].is_static


def test_a_mask_that_masks_nothing_is_left_out_as_in_the_run() -> None:
    """transformers makes no mask then; for a trace it makes one. That its code asked is noted."""
    model = meta_model("llama")
    batch = language_model_inputs(model)
    graph = capture(model, {**batch, "attention_mask": torch.ones(batch["input_ids"].shape, dtype=torch.long)})
    attention = next(o for o in graph.operators if o.name == "aten.scaled_dot_product_attention.default")
    assert attention.argument("attn_mask") is None
    assert graph.asked == {"[1]['attention_mask']"}


def test_sizes_collide_with_none_of_the_models() -> None:
    model = meta_model("llama", vocab_size=61, num_hidden_layers=3)
    batch, length = language_model_inputs(model)["input_ids"].shape
    taken = {size for parameter in model.parameters() for size in parameter.shape} | {3}
    assert batch not in taken
    assert length not in taken


@pytest.mark.parametrize(
    ("changes", "shape", "dtype"),
    [
        ({"num_labels": 3}, 1, torch.long),
        ({"num_labels": 1}, 1, torch.float32),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, 2, torch.float32),
        ({"num_labels": 2, "problem_type": "regression"}, 2, torch.float32),
    ],
)
def test_synthetic_labels_are_as_the_config_says(changes: dict[str, Any], shape: int, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(tiny_config("llama", num_hidden_layers=1, **changes))
    labels = language_model_inputs(model)["labels"]
    assert (labels.ndim, labels.dtype) == (shape, dtype)
    graph = capture(model)
    assert not graph.opaque
    assert graph.tensors[graph.outputs[0]].shape == ()  # the loss


class Peeking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.linear(x).sum().item() > 0:
            return x
        return -x


class Counting(Peeking):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


def test_running_a_module_for_its_shapes_leaves_its_buffers_as_they_are() -> None:
    inner = Counting()
    assert capture(Outer(inner), torch.zeros(2, 4)).opaque == {"inner"}
    assert inner.calls.item() == 0


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x


def test_a_module_that_needs_values_is_one_operator() -> None:
    graph = capture(Outer(Peeking()), torch.zeros(2, 4))
    (opaque,) = [operator for operator in graph.operators if operator.name == OPAQUE]
    assert opaque.module == "inner"
    assert {graph.parameters[t] for t in opaque.inputs if t in graph.parameters} == {
        "inner.linear.weight",
        "inner.linear.bias",
    }
    assert graph.tensors[opaque.outputs[0]].shape == (2, 4)
    assert graph.opaque == {"inner"}


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


def test_packed_sequences_are_for_a_module_inside() -> None:
    x = torch.zeros(2, 3, 4)
    with pytest.raises(
        CaptureError, match=r"in module \(root\)\n  at .*_capture.py:\d+[\s\S]*own inside Packing, which"
    ):
        capture(Packing(), x)
    assert capture(Outer(Packing()), x).opaque == {"inner", "inner.rnn"}


def test_what_follows_from_the_batch_alone_has_a_value() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, ids: Tensor) -> Tensor:
            if (ids > 5).sum().item() != 3:
                raise ValueError("the values are lost")
            return self.table(ids)[ids > 5]

    graph = capture(Masked(), torch.tensor([[1, 6, 7], [2, 3, 6]]))
    assert not graph.opaque
    assert graph.tensors[graph.outputs[0]].shape == (3, 4)


class Reading(nn.Module):
    """Looks up states of indices, and does something with both."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(8, 4), read

    def forward(self, ids: Tensor) -> Tensor:
        return self.read(self.table(ids), ids)


@pytest.mark.parametrize(
    ("made", "ones"),
    [
        (lambda hidden, ids: torch.zeros_like(hidden), 0),
        (lambda hidden, ids: hidden.new_ones(3), 3),
        (lambda hidden, ids: torch.empty_like(hidden).fill_(2), 24),
        (lambda hidden, ids: ids.view_as(hidden[:, :, 0]), 5),
        (lambda hidden, ids: ids.type_as(hidden), 5),
    ],
)
def test_a_tensor_that_lends_its_shape_needs_no_value(made: Callable[[Tensor, Tensor], Tensor], ones: int) -> None:
    model = Reading(lambda hidden, ids: hidden.sum() * made(hidden, ids).nonzero())
    graph = capture(model, torch.tensor([[1, 6, 7], [2, 0, 6]]))
    assert graph.tensors[graph.outputs[0]].shape[0] == ones


@pytest.mark.parametrize(
    "places",
    [
        lambda ids: ([0, 1], [2, 0]),
        lambda ids: ((0, 1), (2, 0)),
        lambda ids: (range(2), [[2, 0]]),
        lambda ids: ([0, 1], [ids.max() - 5, 0]),  # a number that follows from the batch
        lambda ids: [1],
        lambda ids: [True, False],
        lambda ids: (slice(None), []),
    ],
)
def test_lists_of_numbers_in_an_index_have_values(places: Callable[[Tensor], Any]) -> None:
    """torch itself makes the tensors of such an index, where a trace does not see it."""

    def masked(hidden: Tensor, ids: Tensor) -> Tensor:
        mask = torch.full_like(hidden[:, :, 0], True, dtype=torch.bool)
        mask[places(ids)] = False
        return hidden[mask]

    model = Reading(masked)
    ids = torch.tensor([[1, 6, 7], [2, 0, 6]])
    graph = capture(model, ids)
    assert not graph.opaque
    assert graph.tensors[graph.outputs[0]].shape == tuple(model(ids).shape)


def test_a_list_of_tensors_is_an_index_for_each_dim() -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return x[[ids, ids]] + x[[0, 1]].sum()

    x, ids = torch.randn(3, 3, requires_grad=True), torch.tensor([1, 2])
    graph = capture(Rows(), (x, ids))
    assert graph.tensors[graph.outputs[0]].shape == (2,)


def test_an_operator_may_ask_for_a_number_and_take_what_has_no_value() -> None:
    def narrowed(hidden: Tensor, ids: Tensor) -> Tensor:
        start = (ids > 5).sum()
        return hidden.narrow(1, start, ids.shape[1] - start)

    graph = capture(Reading(narrowed), torch.tensor([[1, 6, 3], [2, 0, 1]]))
    assert not graph.opaque
    assert graph.tensors[graph.outputs[0]].shape == (2, 2, 4)
    assert [o.argument("start") for o in graph.operators if o.name == "aten.narrow.default"] == [1]


def test_what_python_makes_of_numbers_has_a_value() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            ends = torch.tensor([0, lengths.max(), 2 * int(lengths.max())], device=x.device).cumsum(0)
            steps = torch.Tensor([2, 1]).long()  # the class: a trace does not see it
            if torch.tensor(data=[lengths.max()]).tolist() != [int(lengths.max())]:
                raise ValueError("a value given by name is lost")
            if torch.tensor([[1, 2]], device=x.device).tolist() != [[1, 2]]:
                raise ValueError("the values are lost")
            rows = (ends[1:] - ends[:-1]).tolist()
            return torch.cat(self.linear(x).split(rows)[:: int(steps[0])])

    graph = capture(Counting(), (torch.zeros(6, 4), torch.tensor([1, 2])))
    assert not graph.opaque
    assert graph.tensors[graph.outputs[0]].shape == (2, 4)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.reshape(-1)[0],
        lambda x: x.view(4, 3)[0],
        lambda x: x.t()[0],
        lambda x: x.permute(1, 0)[1:, 0],
        lambda x: x.diagonal(),
        lambda x: x.unsqueeze(1)[:, 0].flatten()[2:4],
    ],
)
def test_what_is_written_through_a_view_has_a_value(view: Callable[[Tensor], Tensor]) -> None:
    def written(device: str) -> list[int]:
        x = torch.stack([torch.arange(6, device=device), torch.arange(6, device=device) + 7])
        view(x).add_(100)
        return torch.tensor([x.max(), *x.sum(0)], device=device).tolist()

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if written(str(x.device)) != expected:
                raise ValueError("the values are lost")
            result: Tensor = self.linear(x)
            return result

    expected = written("cpu")
    assert not capture(Positions(), torch.zeros(6, 4)).opaque


def test_an_einsum_of_what_follows_from_the_batch_alone_has_sizes() -> None:
    class Rotary(nn.Module):
        """Rows of angles as many as tokens, of which the code asks."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            angles = torch.einsum("i, j -> i j", torch.arange(x.shape[1]).float(), torch.ones(8))
            result: Tensor = self.linear(x) * angles[: x.shape[1] if angles.shape[0] > 2 else 1]
            return result

    assert not capture(Rotary(), torch.zeros(2, 5, 8)).opaque


class Reversible(torch.autograd.Function):
    """Its backward pass may run the module another way."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        return x + module(x)


@pytest.mark.parametrize("around", ["an autograd function", "a checkpoint", "nothing"])
def test_calls_in_autograd_functions_are_told_apart(around: str) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor
            if around == "an autograd function":
                result = Reversible.apply(self.inner, x)
            elif around == "a checkpoint":
                result = x + checkpoint(self.inner, x, use_reentrant=True)
            else:
                result = x + self.inner(x)
            return result.sin()

    calls = {call.site.function: call.in_function for call in capture(Around(), torch.zeros(2, 4)).calls}
    assert calls["linear"] == (around == "an autograd function")
    assert not calls["sin"]


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Mapped(nn.Module):
    """An up- and a down-projection; between them, what ``torch.vmap`` maps over rows or pairs of them."""

    def __init__(self, row: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.ones(8))
        self.row = row

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0])
        same = torch.vmap(torch.vmap(lambda a, b: a == b, (None, 0)), (0, None))(rows, rows)
        scaled = torch.vmap(lambda row: self.row(row) * self.scale)(self.up(x))
        return same.float() @ self.down(scaled)


@pytest.mark.parametrize("row", [torch.tanh, Doubled.apply], ids=["operators", "custom function"])
def test_under_vmap_operators_are_known_and_whole(row: Callable[[Tensor], Tensor]) -> None:
    model = Mapped(row)
    graph = capture(model, torch.zeros(3, 4))
    assert not graph.opaque
    mapped = {operator.name: operator for operator in graph.operators if operator.name.startswith("transformed.")}
    (same,) = mapped["transformed.aten.eq.Tensor"].outputs
    (scaled,) = mapped["transformed.aten.mul.Tensor"].outputs
    assert (graph.tensors[same].is_static, graph.tensors[scaled].is_static) == (True, False)
    assert graph.tensors[scaled].shape == (3, 8)
    assert "scale" in {graph.parameters.get(tensor) for tensor in mapped["transformed.aten.mul.Tensor"].inputs}
    _, solution = make_plan(model, 2, example_inputs=torch.zeros(3, 4))  # proven on both ranks
    for operator in solution.graph.operators:
        if operator.name.startswith("transformed."):
            layouts = [solution.layouts.get(tensor) for tensor in (*operator.inputs, *operator.outputs)]
            assert not any(isinstance(layout, Shard) for layout in layouts)


@pytest.mark.parametrize(
    "row", [lambda row: row.add_(1), lambda row: torch.func.grad(torch.sum)(row)], ids=["writes", "derivatives"]
)
def test_a_transform_that_cannot_be_followed_makes_its_module_opaque(row: Callable[[Tensor], Tensor]) -> None:
    graph = capture(Outer(Mapped(row)), torch.zeros(3, 4))
    assert graph.opaque == {"inner"}


@pytest.mark.parametrize(
    "scripted", [torch.jit.script, lambda module: torch.jit.trace(module, torch.zeros(3, 8))], ids=["script", "trace"]
)
def test_modules_of_torchscript_are_refused(scripted: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), scripted(nn.Linear(8, 8)))
    with pytest.raises(CaptureError, match=r"^1 \(.*use the module that it was made of"):
        make_plan(model, 2, example_inputs=torch.zeros(3, 8))


def test_opaque_modules_inside_an_opaque_module() -> None:
    class Twice(Outer):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.inner(x).sum().item() > 0 else -x

    graph = capture(Outer(Twice(Peeking())), torch.zeros(2, 4))
    assert graph.opaque == {"inner", "inner.inner"}
    assert [operator.module for operator in graph.operators if operator.name == OPAQUE] == ["inner"]


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.width = nn.Linear(8, 4), 8

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.width:
            raise ValueError("another width")
        return self.linear(x)


def test_a_size_read_before_the_first_child_is_made_local() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Checked())
    plan, _ = make_plan(model, 2, example_inputs=torch.zeros(3, 4))
    assert [(size.module, size.attribute) for size in plan.sizes] == [("2", "width")]
    assert plan.sharded_fraction > 0.9


class Grouped(nn.Module):
    """Heads in groups: the code stores how many there are of each, and computes the heads per group."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.groups = 8, 4
        self.project, self.scale, self.merge = nn.Linear(16, 8 * 4), nn.Linear(16, 8), nn.Linear(8 * 4, 16)

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:-1], self.groups, self.heads // self.groups
        scaled = self.project(x).view(*shape, 4).softmax(-1) * self.scale(x).view(*shape, 1)
        return self.merge(scaled.flatten(-3))


def test_numbers_of_which_code_takes_a_ratio_are_made_local_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted_traces(monkeypatch)
    plan, _ = make_plan(nn.Sequential(Grouped()), 4, example_inputs=torch.zeros(3, 16))
    local = {(size.module, size.attribute, size.local, size.call) for size in plan.sizes}
    assert local == {("0", "heads", (2,) * 4, None), ("0", "groups", (1,) * 4, None)}
    assert plan.sharded_fraction > 0.9
    assert len(made) == 4  # traces: with neither number local, with each of the two, and with both


def test_a_search_for_sizes_that_gets_nowhere_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localize, "_PATIENCE", -1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Checked(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    plan, _ = make_plan(model, 2, example_inputs=torch.zeros(3, 4))
    reasons = {parameter.names[0]: parameter.reason or "" for parameter in plan.parameters}
    assert "could not be made local" in reasons["2.linear.weight"]
    assert not reasons["5.weight"]


class EitherWidth(nn.Module):
    """Code that takes what is as long as one of two numbers: with either of them local, a part passes."""

    def __init__(self) -> None:
        super().__init__()
        self.width = self.other = 8

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] not in (self.width, self.other):
            raise ValueError("another width")
        return x * 2


class OfEight(nn.Module):
    """Code that no change makes local."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 4 + 4:
            raise ValueError("another width")
        return x.relu()


def counted_traces(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The traces of local models that are made from now on."""
    made: list[object] = []
    trace = localize.capture_local

    def counted(*args: Any) -> Any:
        made.append(args)
        return trace(*args)

    monkeypatch.setattr(localize, "capture_local", counted)
    return made


def test_what_nothing_makes_local_is_not_tried_after_every_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted_traces(monkeypatch)
    choices = [type(f"EitherWidth{number}", (EitherWidth,), {})() for number in range(5)]
    model = nn.Sequential(nn.Linear(4, 8), *choices, OfEight(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    plan, _ = make_plan(model, 2, example_inputs=torch.zeros(3, 4))
    assert not plan.sizes  # nothing is local
    assert plan.sharded_fraction > 0.9  # but in parameters
    assert len(choices) < len(made) < 4 * len(choices)  # each number of each module once or twice


def test_with_sharded_tokens_sizes_are_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted_traces(monkeypatch)
    model = meta_model("gpt2")
    whole, _ = make_plan(model, 2)
    of_sizes = len(made)
    made.clear()
    plan, _ = make_plan(model, 2, sequence_parallel=True)
    assert plan.shards_sequence
    assert plan.sizes
    assert set(plan.sizes) < set(whole.sizes)
    assert len(made) < 4 * of_sizes  # among them those of code that counts tokens, which no size mends


def test_writes_in_place_reach_whoever_reads_the_memory() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result = torch.zeros(2, 8)
            result[:, :4] = self.linear(x)
            result[:, 4:].add_(1)
            return result * 2

    graph = capture(Writing(), torch.zeros(2, 4))
    names = [operator.name for operator in graph.operators]
    assert names.count("aten.slice_scatter.default") == 2
    assert not any(name.split(".")[1].endswith("_") for name in names if name.startswith("aten."))
    assert not graph.tensors[graph.outputs[0]].is_static


def test_writes_to_a_list_of_tensors_are_seen() -> None:
    """Such an operator returns nothing. Unseen, what it adds would be added to every rank's part of a sum."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            parts = [self.down(self.up(x)).clone(), torch.zeros(2, 4)]
            torch._foreach_add_(parts, 1)
            return parts[0] * 2

    graph = capture(Writing(), torch.zeros(2, 4))
    (operator,) = [operator for operator in graph.operators if operator.name == "aten._foreach_add.Scalar"]
    (product,) = [operator for operator in graph.operators if operator.name == "aten.mul.Tensor"]
    assert product.inputs == operator.outputs[:1]
    assert len(operator.outputs) == 2


def test_static_operators_stand_where_they_are_needed() -> None:
    class Unordered(nn.Module):
        def __init__(self, order: list[str]) -> None:
            super().__init__()
            self.linear, self.order = nn.Linear(4, 4), order

        def forward(self, x: Tensor) -> Tensor:
            masks = {name: torch.ones(4) * (3 if name == "left" else 5) for name in self.order}
            return self.linear(x) * masks["left"] + masks["right"]

    graphs = [capture(Unordered(order), torch.zeros(2, 4)) for order in (["left", "right"], ["right", "left"])]
    assert [o.name for o in graphs[0].operators] == [o.name for o in graphs[1].operators]
    assert [[v for _, v in o.arguments if isinstance(v, int)] for o in graphs[0].operators] == [
        [v for _, v in o.arguments if isinstance(v, int)] for o in graphs[1].operators
    ]


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_in_a_trace_is_that_of_the_run(outside: bool) -> None:
    class Doubling(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @torch.autocast("cuda", enabled=False)
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            device = x.device.type
            with torch.autocast(device, enabled=False):
                whole = Doubling.apply(self.linear(x.float()))
            with torch.autocast(device_type=device, dtype=torch.float16):
                half = x.matmul(x.T)
                assert torch.get_autocast_dtype(device) == torch.float16
            return whole, half, self.linear(x)

    model, x = Casting(), torch.zeros(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
        graph = capture(model, x)
        run = model(x)
    assert [graph.tensors[output].dtype for output in graph.outputs] == [str(made.dtype)[6:] for made in run]
    assert [made.dtype for made in run] == [torch.float32, torch.float16, torch.bfloat16 if outside else torch.float32]


def test_code_that_asks_for_the_device_gets_that_of_the_run() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made = torch.ones(4) + torch.arange(4, device=self.linear.weight.device)
            if x.is_meta or x.device.type != "cpu" or self.linear.weight.is_meta or made.device != x.device:
                return x.square()
            return self.linear(x * made)

    names = [operator.name for operator in capture(Asking().to("meta"), torch.zeros(3, 4, device="meta")).operators]
    assert "aten.linear.default" in names
    assert "aten.square.default" not in names


class AsksForAGPU(nn.Module):
    """A block whose code is another on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() if x.is_cuda else self.up(x).tanh())


def test_the_code_for_another_device_is_traced_or_the_plan_says_that_it_is_not() -> None:
    def planned(device: str | None) -> tuple[Plan, set[str]]:
        plan, solution = make_plan(AsksForAGPU(), 2, example_inputs=torch.zeros(3, 16), device=device)
        return plan, {operator.name for operator in solution.graph.operators}

    (here, ran), (there, ran_there) = planned(None), planned("cuda:1")
    assert "aten.tanh.default" in ran
    assert (here.device, here.traced_on, here.traced) == ("cpu", "cpu", "traced with example_inputs, as on cpu")
    assert planned("cpu") == (here, ran)
    assert there.device == "cuda"
    if torch.backends.cuda.is_built():  # no GPU is needed
        assert "aten.relu.default" in ran_there
        assert there.traced == "traced with example_inputs, as on cuda"
    else:
        assert ran_there == ran
        assert there.traced_on == "cpu"
        assert "as on cpu and not as on cuda, which that build of torch does not have" in there.traced
    for plan in (here, there):
        assert Plan.from_json(plan.to_json()) == plan
        older = json.loads(plan.to_json())
        del older["device"], older["traced_on"]
        assert Plan.from_json(json.dumps(older)) == replace(plan, device="", traced_on="")


def test_failure_names_module_and_line() -> None:
    with pytest.raises(CaptureError, match=r"inner[\s\S]*test_capture\.py:\d+ in .*forward"):
        capture(Outer(Broken()), torch.zeros(2, 4))

    with pytest.raises(
        CaptureError, match=r"Run on its own with random numbers, inner raises, too: RuntimeError: mat1"
    ):
        capture(Outer(Broken()), torch.zeros(2, 4))


class Numpy(nn.Module):
    """What it computes goes through numpy, where no trace follows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        size = np.sqrt((np.asarray(x.detach().cpu()) ** 2).sum())
        assert size >= 0
        return self.scale(x) / float(1 + size)


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.odd = nn.Linear(8, 64), nn.Linear(64, 8), nn.Sequential(Numpy())

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.down(self.up(x).relu())).tanh()


def train_between(rank: int, world_size: int) -> tuple[float, str]:
    torch.manual_seed(0)
    local = assert_same_training(Between(), (torch.randn(3, 8),), lambda result: result.square().mean())
    plan = parallel_state(local).plan
    (reason,) = [parameter.reason for parameter in plan.parameters if parameter.names == ("odd.0.scale.weight",)]
    return plan.sharded_fraction, str(reason)


def test_a_module_that_cannot_be_traced_stays_whole_and_the_plan_says_why() -> None:
    graph = capture(Between(), torch.zeros(3, 8))
    assert graph.opaque == {"odd.0"}
    for fraction, reason in run_ranks(train_between, 2):
        assert fraction > 0.85
        assert re.search(r"odd\.0 .*its code cannot be traced \(\w+: .*numpy", reason)


def test_a_module_that_is_too_large_to_be_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "LARGEST", 10)
    with pytest.raises(
        CaptureError, match=r"as part of odd\.0, but that is too large to be run once[\s\S]*part of odd,"
    ):
        capture(Between(), torch.zeros(3, 8))


def test_only_the_outermost_forward_must_be_traced() -> None:
    with pytest.raises(CaptureError, match=r"numpy[\s\S]*in module \(root\)"):
        capture(Numpy(), torch.zeros(3, 8))
    assert capture(nn.Sequential(Outer(Numpy())), torch.zeros(3, 8)).opaque == {"0.inner"}


@pytest.mark.parametrize(
    ("index", "run"),
    [
        ((..., [-2], slice(None)), (1, 2, 3)),
        ([1, 2], (0, 1, 3)),
        ((slice(None), [0, 2]), None),
        ((slice(None), [1, 0]), None),
        (([0], [1]), None),
    ],
    ids=str,
)
def test_a_list_of_consecutive_numbers_is_a_slice(index: Any, run: tuple[int, int, int] | None) -> None:
    class Picking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            picked = x[index]
            picked.mul_(2)  # memory of its own: x stays as it was
            return picked.sum() + x.sum()

    graph = capture(Picking(), torch.zeros(5, 4, 6, requires_grad=True))
    (picking,) = (
        operator for operator in graph.operators if operator.name in ("aten.slice.Tensor", "aten.index.Tensor")
    )
    arguments = dict(picking.arguments)
    found = (arguments["dim"], arguments["start"], arguments["end"]) if "start" in arguments else None
    assert found == run
    assert not any("scatter" in operator.name for operator in graph.operators)


def test_missing_inputs_are_asked_for() -> None:
    with pytest.raises(CaptureError, match="example_inputs"):
        capture(Outer(Broken()))


def test_until_failure_shows_how_far_it_came() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu().view(5, 5).tanh()

    with pytest.raises(CaptureError):
        capture(Breaks(), torch.zeros(2, 4))
    names = [operator.name for operator in capture_local(Breaks(), torch.zeros(2, 4)).operators]
    assert "aten.relu.default" in names
    assert "aten.tanh.default" not in names


def test_meta_copy_copies_as_deepcopy_does() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    vars(model[0])["shared"] = vars(model[1])["shared"] = {"of both": [1]}
    vars(model[2])["__deepcopy__"] = lambda memo: nn.Identity()
    vars(model)["around"] = (model, model[0], max)
    model.compile(backend="eager")  # what it leaves on a module is not copied
    kept: list[list[Any]] = []
    for copied in (copy.deepcopy(model), meta_copy(model)):
        held: list[dict[str, Any]] = [vars(module) for module in copied.modules()]
        assert held[0]["around"] == (copied, copied[0], max)
        assert held[1]["shared"] is held[2]["shared"] is not vars(model[0])["shared"]
        assert held[2]["shared"]["of both"] is not vars(model[1])["shared"]["of both"]
        assert isinstance(copied[2], nn.Identity)
        kept.append([holder.keys() for holder in held])
    assert kept[0] == kept[1]
    assert kept[0][0] < vars(model).keys()


def test_a_tensor_that_code_replaces_is_alive_until_the_trace_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one would have its number, and be taken for it."""
    found: list[weakref.ref[Tensor]] = []
    note = capturing._note_kept

    def looked_at(traced: nn.Module, before: Any, tracer: Any) -> None:
        assert None not in [reference() for reference in found]
        note(traced, before, tracer)

    def fake_like(*args: Any) -> Tensor:
        made = make(*args)
        if made.numel():  # of others only the attributes are asked for
            found.append(weakref.ref(made))
        return made

    make = capturing.fake_like
    monkeypatch.setattr(capturing, "_note_kept", looked_at)
    monkeypatch.setattr(capturing, "fake_like", fake_like)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.l1_unstructured(model[2], "bias", 0.5)
    graph = capture(model, torch.ones(3, 4))
    kept = {(operator.module, operator.argument("name")) for operator in graph.operators if operator.name == KEPT}
    assert kept == {("0", "weight"), ("2", "bias")}
    assert len(found) > 6


def test_meta_copy_copies_no_values() -> None:
    model = tiny_model("gemma2")
    copied = meta_copy(model)
    assert all(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers()))
    assert copied.lm_head.weight is copied.model.embed_tokens.weight


def test_code_that_goes_on_under_another_caller_is_looked_at_with_it() -> None:
    """A generator's frame is the same in every step, what calls it is not: what its callers keep is put back."""
    outside = KeptOutside()
    callers: list[dict[str, Any]] = [{"table": {}}, {"table": {}}]
    for names in callers:
        exec(compile("def call(function): function()", "model.py", "exec"), names)

    def steps() -> Iterator[None]:
        while True:
            outside.look(sys._getframe())
            yield

    going_on = steps()
    outside.begin(sys._getframe())
    for names in callers:
        names["call"](going_on.__next__)
        names["table"]["kept"] = torch.zeros(2)
    outside.put_back()
    assert [names["table"] for names in callers] == [{}, {}]
