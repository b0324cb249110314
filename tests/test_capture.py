from __future__ import annotations

import pytest
import torch
from tiny import Decoder, decoder_batch, meta_model, tiny_model
from torch import Tensor, nn

from lightning_autotp.capture import CaptureError, capture, capture_local, language_model_inputs, meta_copy
from lightning_autotp.graph import OPAQUE


def test_boundaries_surround_every_module() -> None:
    graph = capture(Decoder(), decoder_batch())
    crossed = {str(operator.boundary) for operator in graph.operators if operator.boundary}
    assert {"norm.in[0][0]", "norm.out", "q.in[0][0]", "q.out", "table.out", "(root).out"} <= crossed
    linears = [operator for operator in graph.operators if operator.name == "aten.linear.default"]
    assert [operator.module for operator in linears] == ["q", "k", "v", "o", "gate", "up", "down", "classes"]
    assert all(operator.layer == "linear" and "tiny.py" in operator.source for operator in linears)


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
    graph = capture(meta_model("llama"))
    by_name = {operator.name: operator for operator in graph.operators}
    assert graph.tensors[by_name["aten.cumsum.default"].outputs[0]].is_static
    assert not graph.tensors[by_name["aten.scaled_dot_product_attention.default"].outputs[0]].is_static


def test_sizes_collide_with_none_of_the_models() -> None:
    model = meta_model("llama", vocab_size=61, num_hidden_layers=3)
    batch, length = language_model_inputs(model)["input_ids"].shape
    taken = {size for parameter in model.parameters() for size in parameter.shape} | {3}
    assert batch not in taken
    assert length not in taken


class Peeking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.linear(x).sum().item() > 0:
            return x
        return -x


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


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


def test_failure_names_module_and_line() -> None:
    with pytest.raises(CaptureError, match=r"inner[\s\S]*test_capture\.py:\d+ in .*forward"):
        capture(Outer(Broken()), torch.zeros(2, 4))


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


def test_meta_copy_copies_no_values() -> None:
    model = tiny_model("gemma2")
    twin = meta_copy(model)
    assert all(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
