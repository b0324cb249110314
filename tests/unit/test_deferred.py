"""Building without memory: every value, and the generator's state, must be ordinary execution's, bit for bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from deferred_models import CONFIGS, named, ties
from local_model import state_of
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
)

from lightning_autotp.building.deferred import deferred_init
from lightning_autotp.building.recipe import Recipe
from lightning_autotp.layouts.types import Invariant
from lightning_autotp.ranks.group import TPGroup


def build_both(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Build ordinarily and without memory from the same seed, and compare everything."""
    torch.manual_seed(3)
    expected = build()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with deferred_init():
        model = build()
    assert torch.equal(torch.get_rng_state(), state), "the generator is elsewhere"
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert ties(model) == ties(expected)
    values = named(expected)
    for name, parameter in named(model).items():
        assert type(parameter) is nn.Parameter, name
        assert parameter.is_meta, name
        assert parameter.requires_grad == values[name].requires_grad, name
        made = parameter.autotp_recipe()
        assert (made.dtype, made.shape) == (values[name].dtype, values[name].shape), name
        assert torch.equal(made, values[name]), name
        assert torch.equal(parameter.autotp_recipe(), values[name]), f"{name} differs the second time"
    assert torch.equal(torch.get_rng_state(), state), "making a tensor moved the generator"
    buffers = dict(expected.named_buffers())
    for name, buffer in model.named_buffers():
        assert not buffer.is_meta, name
        assert torch.equal(buffer, buffers[name]), name
    return expected, model


class Initializers(nn.Module):
    """Every initializer of torch.nn.init, with numbers drawn in between."""

    def __init__(self) -> None:
        super().__init__()
        names = ["normal_", "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_", "kaiming_normal_"]
        names += ["kaiming_uniform_", "orthogonal_", "eye_", "ones_", "zeros_"]
        for name in names:
            setattr(self, name.rstrip("_"), nn.Parameter(torch.empty(12, 7)))
            getattr(nn.init, name)(getattr(self, name.rstrip("_")))
        self.wide = nn.Parameter(torch.empty(5, 9))
        nn.init.orthogonal_(self.wide, gain=3.0)
        self.tight = nn.Parameter(torch.empty(40, 40))
        nn.init.trunc_normal_(self.tight, std=1.0, a=-0.2, b=0.3)  # draws again until all are in range
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(10, 6), 0.3))
        self.sparse_later = nn.Parameter(torch.empty(10, 6))
        nn.init.sparse_(self.sparse_later, 0.3)
        self.kernel = nn.Parameter(torch.empty(6, 4, 3))
        nn.init.dirac_(self.kernel, groups=2)
        self.constant = nn.Parameter(torch.empty(3))
        nn.init.constant_(self.constant, 0.25)
        self.own = nn.Parameter(torch.empty(20))
        nn.init.normal_(self.own, generator=torch.Generator().manual_seed(7))
        for name in ("exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_"):
            setattr(self, name, nn.Parameter(torch.empty(9)))
            getattr(getattr(self, name).data, name)(*([0.3] if name in ("geometric_", "bernoulli_") else []))
        self.last = nn.Parameter(torch.randn(4, 5) * 0.02)


class Layers(nn.Module):
    """Torch's own layers, among them ones that copy parameters and parametrizations that compute on them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.embedding = nn.Embedding(11, 6, padding_idx=3)
        self.norm = nn.LayerNorm(6)
        self.batch_norm = nn.BatchNorm1d(4)
        self.conv = nn.Conv2d(3, 4, 3)
        self.lstm = nn.LSTM(4, 5, num_layers=2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        self.half = nn.Linear(6, 4, dtype=torch.bfloat16)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.double = nn.Linear(3, 3).double()
        self.tied = nn.Linear(6, 11, bias=False)
        self.tied.weight = self.embedding.weight


class Awkward(nn.Module):
    """Aliases, views, values from elsewhere, control flow on values."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(8, 3)
        self.upper, self.lower = nn.Parameter(both[:4]), nn.Parameter(both[4:])
        alias = torch.empty(6)
        self.written_through_alias = nn.Parameter(alias)
        alias.normal_()
        self.read_through_alias = nn.Parameter(torch.empty(6))
        first = torch.zeros(6)
        self.changed = nn.Parameter(first)
        nn.init.normal_(self.changed)
        self.read_through_alias.data.copy_(first * 2)
        self.total = first.sum().item()
        self.listed = [self.changed.tolist(), self.changed.detach().numpy().tolist()]
        self.register_buffer("alias", first)
        nn.init.ones_(self.changed[:2].detach())
        self.literal = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        given = torch.from_numpy(np.arange(6, dtype=np.float32))
        self.from_numpy = nn.Parameter(given)
        given.mul_(2)
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())
        self.data_set = nn.Parameter(torch.empty(3))
        self.data_set.data = torch.rand(5)
        self.sum = nn.Parameter(self.upper * 2 + self.lower)
        self.register_buffer("derived", self.sum.detach().mean(0) + 1)
        self.lower.data.to("cpu").mul_(2)  # itself, not a copy
        self.lower.data.cpu().add_(1)
        self.lower.data.to("cpu", torch.float32).sub_(0.5)
        self.lower.data.to(device=torch.device("cpu")).mul_(3)
        self.lower.data.to("cpu", copy=True).zero_()
        self.as_double = nn.Parameter(self.lower.data.to("cpu", torch.float64))
        self.like_another = nn.Parameter(torch.arange(3).to(self.lower) / 3)
        self.typed_like_another = nn.Parameter(torch.arange(3).type_as(self.as_double))
        self.kept = self.lower.detach().abs()
        self.kept_copy = copy.deepcopy(self.kept)
        self.scale = self.upper.abs().max().item()
        self.positive = nn.Parameter(self.upper[self.upper > 0].detach())
        self.branch = nn.Linear(3, 3) if (self.lower.sum() > self.scale) else nn.Linear(3, 4)
        self.like = nn.Parameter(torch.randn_like(self.lower))
        self.on_their_device = nn.Parameter(torch.randn(4, device=self.lower.device))
        self.moved = nn.Parameter(torch.arange(4.0).to(self.lower.device) / 3)
        self.chosen = nn.Parameter(torch.multinomial(self.upper.detach().abs().flatten(), 4).float())
        self.noisy = nn.Parameter(nn.functional.dropout(self.upper.detach(), 0.5))
        self.padded = nn.Parameter(torch.empty(2))
        self.padded.data = nn.functional.pad(self.padded.data.fill_(1.5), (0, 3))
        donor = nn.Linear(3, 5)
        self.loaded = nn.Linear(3, 5)
        self.loaded.load_state_dict(donor.state_dict())
        self.copied = copy.deepcopy(self.loaded)
        nn.init.normal_(self.copied.bias)


@pytest.mark.parametrize("build", [Initializers, Layers, Awkward])
def test_plain_modules(build: type[nn.Module]) -> None:
    expected, model = build_both(build)
    if isinstance(model, Awkward) and isinstance(expected, Awkward):
        assert (model.scale, model.total, model.listed) == (expected.scale, expected.total, expected.listed)
        assert type(model.kept) is Tensor
        assert torch.equal(model.kept, expected.kept)
        assert torch.equal(model.kept_copy, expected.kept)


def test_default_dtype_is_that_of_the_time() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with deferred_init():
            torch.manual_seed(0)
            parameter = nn.Parameter(torch.randn(5) / torch.arange(1, 6))
    finally:
        torch.set_default_dtype(torch.float32)
    made = parameter.autotp_recipe()
    torch.manual_seed(0)
    assert torch.equal(made, torch.randn(5, dtype=torch.bfloat16) / torch.arange(1, 6))
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_from_config(family: str, dtype: torch.dtype) -> None:
    config = CONFIGS[family]
    _, model = build_both(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))
    recipes = [parameter.autotp_recipe for parameter in model.parameters()]
    # What was overwritten later is not computed: a normal_ and at most the zeros of the padding row.
    drawn = [sum(step.random is not None for step in recipe.steps) for recipe in recipes]
    assert max(drawn) == 1


def test_model_with_tied_bias() -> None:
    build_both(lambda: BertForMaskedLM(BertConfig(vocab_size=99, hidden_size=24, num_attention_heads=2)))


def test_resizing_embeddings() -> None:
    def build() -> nn.Module:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["Qwen3"]))
        model.resize_token_embeddings(107)
        return model

    _, model = build_both(build)
    assert model.get_parameter("model.embed_tokens.weight").shape == (107, 32)


def test_meta_model_is_ordinary() -> None:
    with deferred_init():
        model = AutoModelForCausalLM.from_config(CONFIGS["Llama"])
    duplicate = copy.deepcopy(model)
    assert all(parameter.is_meta for parameter in duplicate.parameters())
    duplicate.to("meta")
    ids = torch.zeros(2, 7, dtype=torch.long, device="meta")
    exported = torch.export.export(duplicate, (), {"input_ids": ids, "labels": ids, "use_cache": False}, strict=False)
    assert any("embedding" in str(node.target) for node in exported.graph.nodes)
    metas = state_of(model, TPGroup("", 0, 1), lambda *_: Invariant()).metas
    assert all(isinstance(meta.init_fn, Recipe) and meta.need_initialize for meta in metas.values())
    assert not any(hasattr(parameter, "autotp_recipe") for parameter in model.parameters())
    assert metas["model.norm.weight"].names == ("model.norm.weight",)
    assert copy.deepcopy(metas["model.norm.weight"]).init_fn is metas["model.norm.weight"].init_fn


def test_nested_contexts_are_one() -> None:
    torch.manual_seed(0)
    expected = [torch.randn(3), torch.randn(3)]
    torch.manual_seed(0)
    with deferred_init():
        with deferred_init():
            first = nn.Parameter(torch.randn(3))
        second = nn.Parameter(torch.randn(3))
    assert torch.equal(first.autotp_recipe(), expected[0])
    assert torch.equal(second.autotp_recipe(), expected[1])


def test_other_threads_are_left_alone() -> None:
    made: list[nn.Parameter] = []
    errors: list[str] = []

    def elsewhere() -> None:
        made.append(nn.Parameter(torch.ones(2)))
        try:
            with deferred_init():
                pass
        except RuntimeError as error:
            errors.append(str(error))

    with deferred_init():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not made[0].is_meta
    assert "another thread" in errors[0]


def test_values_given_from_outside_must_not_change_later() -> None:
    given = torch.ones(4)
    with deferred_init():
        parameter = nn.Parameter(torch.zeros(4))
        parameter.data.copy_(given)
    assert torch.equal(parameter.autotp_recipe(), torch.ones(4))
    given.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after the model was built"):
        parameter.autotp_recipe()


def test_what_is_meant_to_be_on_meta_has_no_recipe() -> None:
    state = torch.get_rng_state()
    with deferred_init():
        layer = nn.Linear(3, 3, device="meta")
        assert layer.weight.is_meta
        like = nn.Parameter(torch.empty_like(layer.weight))
        nn.init.normal_(like)
        with torch.device("meta"):
            inner = nn.Embedding(4, 4)
    assert torch.equal(torch.get_rng_state(), state)
    for parameter in (layer.weight, like, inner.weight):
        assert parameter.is_meta
        assert not hasattr(parameter, "autotp_recipe")


def test_values_from_an_empty_meta_tensor_are_an_error() -> None:
    nothing = torch.empty(3, device="meta")
    with pytest.raises(RuntimeError, match="has no values"), deferred_init():
        nn.Linear(3, 3).bias.data.copy_(nothing)


def test_a_model_may_be_compiled_where_it_is_built() -> None:
    torch._dynamo.trace_rules.clear_lru_cache()  # as where nothing was compiled yet
    with deferred_init():
        nn.Linear(3, 3).compile()
    cast = torch.compile(lambda x: Tensor.to(x, torch.float64), backend="eager", fullgraph=True)
    assert cast(torch.ones(3)).dtype == torch.float64
