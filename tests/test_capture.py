from __future__ import annotations

import pytest
import torch
from tiny import Decoder, decoder_batch, meta_model, tiny_model
from torch import Tensor, nn

from lightning_autotp.capture import CaptureError, capture, capture_local, language_model_inputs, meta_copy


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
    def __init__(self) -> None:
        super().__init__()
        self.inner = Peeking()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_failure_names_module_and_line() -> None:
    with pytest.raises(CaptureError, match=r"inner[\s\S]*test_capture\.py:\d+ in .*forward"):
        capture(Outer(), torch.zeros(2, 4))


def test_missing_inputs_are_asked_for() -> None:
    with pytest.raises(CaptureError, match="example_inputs"):
        capture(Outer())


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
