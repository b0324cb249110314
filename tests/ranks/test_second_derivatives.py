"""Derivatives of derivatives on several ranks against one process: Hessian-vector products, gradient penalties.

All in fp64, but norms and rotary embeddings of the families below compute in fp32 whatever their weights are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from shards import maps, part
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lightning_autotp import full_gradients, full_tensor, parallelize
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Partial, Replicate, Shard
from lightning_autotp.parallel import TPGroup, convert, vocab_parallel_cross_entropy

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
    "gemma2": {"sliding_window": 8},
    "qwen3": {"num_hidden_layers": 1},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {"num_hidden_layers": 1, "num_local_experts": 4, "experts_implementation": "batched_mm"},
}
DAILY = ("gpt2", "mixtral")
"""With MAML below, of Llama and Qwen3."""


def model_of(family: str) -> nn.Module:
    # Fused attention has no second derivative, on one process either.
    return tiny_model(family, seed=5, attn_implementation="eager", **FAMILIES[family]).double().train()


def direction(name: str, shape: torch.Size) -> Tensor:
    """A whole tensor to multiply the whole gradient of a parameter with."""
    seed = sum(map(ord, name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def along(model: nn.Module, shapes: dict[str, torch.Size]) -> Tensor:
    """The gradient's component in a direction, and half its square besides: a penalty on the gradient."""
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(model(**token_batch(1)).loss, list(named.values()), create_graph=True)
    found = torch.zeros((), dtype=torch.double)
    for name, gradient in zip(named, gradients, strict=True):
        found = found + (gradient * direction(name, shapes[name])).sum() + gradient.norm().square() / 2
    return found


def hessian_vector_product(family: str) -> tuple[float, dict[str, Tensor]]:
    model = model_of(family)
    value = along(model, {name: parameter.shape for name, parameter in model.named_parameters()})
    value.backward()
    return value.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def local_products(rank: int, size: int, families: tuple[str, ...]) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """The same of a parallel model: the parts of gradients represent the whole ones."""
    found = {}
    for family in families:
        model = model_of(family)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        parallelize(model, dist.group.WORLD, example_inputs=token_batch(0))
        value = along(model, shapes)
        value.backward()
        found[family] = value.item(), full_gradients(model)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "families"),
    [(2, DAILY), *(pytest.param(ranks, tuple(FAMILIES), marks=pytest.mark.nightly) for ranks in (2, 3, 4))],
)
def test_hessian_vector_products(ranks: int, families: tuple[str, ...]) -> None:
    results = run_ranks(local_products, ranks, families)
    for family in families:
        value, products = hessian_vector_product(family)
        for result in results:
            assert result[family][0] == pytest.approx(value, rel=1e-5)
            for name, product in products.items():
                scale = product.abs().max()
                assert scale > 0, name
                error = (result[family][1][name] - product).abs().max() / scale
                assert error < 1e-5, f"{family}: {name} is off by {error:.1e}"


Named = Callable[[nn.Module], dict[str, Tensor]]


def adapted(model: nn.Module, steps: int, start: Named) -> float:
    """MAML: a loss after steps of gradient descent that are differentiated, and a penalty on how far they went."""
    fast = start(model)
    for step in range(steps):
        given = fast if step else dict(model.named_parameters())
        loss = functional_call(model, given, kwargs=token_batch(step)).loss
        gradients = torch.autograd.grad(loss, list(given.values()), create_graph=True)
        fast = {name: x - 0.1 * gradient for (name, x), gradient in zip(fast.items(), gradients, strict=True)}
    far = torch.stack([(fast[name] - x.detach()).norm() for name, x in model.named_parameters() if x.dim() == 2])
    total = functional_call(model, fast, kwargs=token_batch(7)).loss + 0.1 * far.norm()
    total.backward()
    return total.item()


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def whole_where_summed(model: nn.Module) -> dict[str, Tensor]:
    """Those whose gradients are summed over the ranks (norms over heads) as code outside of the model takes them."""
    sums: Any = model.autotp.gradient_sums  # type: ignore[union-attr]
    return {name: full_tensor(model, name) if name in sums else p for name, p in model.named_parameters()}


ADAPTED: dict[str, tuple[str, int, Named]] = {
    "two steps": ("llama", 2, parameters_of),
    "norms over heads": ("qwen3", 1, whole_where_summed),
}


def local_adapted(rank: int, size: int) -> dict[str, tuple[float, dict[str, Tensor]]]:
    found = {}
    for name, (family, steps, start) in ADAPTED.items():
        model = model_of(family)
        parallelize(model, dist.group.WORLD, example_inputs=token_batch(0))
        found[name] = adapted(model, steps, start), full_gradients(model)
    for steps, begin in (1, parameters_of), (2, whole_where_summed):
        with pytest.raises(RuntimeError, match=r"q_norm\.weight was given for one call, and was computed of .* twice"):
            adapted(model, steps, begin)
    with torch.no_grad():
        functional_call(model, {name: 2 * p for name, p in model.named_parameters()}, kwargs=token_batch(0))
    return found


@pytest.mark.slow
def test_maml() -> None:
    results = run_ranks(local_adapted, 2)
    for name, (family, steps, _) in ADAPTED.items():
        model = model_of(family)
        value = adapted(model, steps, parameters_of)
        for result in results:
            assert result[name][0] == pytest.approx(value, rel=1e-5), name
            for key, parameter in model.named_parameters():
                assert parameter.grad is not None
                scale = parameter.grad.abs().max()
                assert scale > 0, key
                error = (result[name][1][key] - parameter.grad).abs().max() / scale
                assert error < 1e-5, f"{name}: {key} is off by {error:.1e}"


def penalized(function: Callable[[Tensor], Tensor], whole: Tensor) -> Tensor:
    """The gradient of a penalty on the function's gradient."""
    x = whole.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    gradient.pow(2).sum().backward()
    assert x.grad is not None
    return x.grad


def check(found: Callable[[Tensor], Tensor], wanted: Callable[[Tensor], Tensor], whole: Tensor, what: str) -> None:
    truth = penalized(wanted, whole)
    assert truth.abs().max() > 0
    torch.testing.assert_close(
        penalized(found, whole), truth, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}"
    )


def check_conversions(ownership: Ownership, group: TPGroup, name: str) -> None:
    """Through every pair of types that brings the whole tensor back."""
    shard = Shard(((1, ownership),))
    whole = torch.randn(3, ownership.size, generator=torch.Generator().manual_seed(7), dtype=torch.double)
    weight = torch.randn(ownership.size, generator=torch.Generator().manual_seed(8), dtype=torch.double)
    own = part(weight.unsqueeze(0), shard, group.rank)[0]
    is_shared = any(len(owners) > 1 for _, _, owners in ownership.owners)

    def gathered(x: Tensor) -> Tensor:
        return convert(convert(x, Invariant(), shard, group).tanh(), shard, Invariant(), group).pow(3).sum()

    def used_differently(x: Tensor) -> Tensor:
        local = convert(convert(x, Invariant(), Replicate(), group), Replicate(), shard, group).tanh()
        return convert(local, shard, Invariant(), group).pow(3).sum()

    def gathered_for_each(x: Tensor) -> Tensor:
        everything = convert(convert(x, Invariant(), shard, group).tanh(), shard, Replicate(), group)
        mine = convert(everything.pow(3), Replicate(), shard, group)
        return convert(mine, shard, Invariant(), group).sum()

    def summed(x: Tensor) -> Tensor:
        local = convert(x, Invariant(), shard, group).tanh()
        return convert(local @ own, Partial(), Invariant(), group).pow(3).sum()

    def scattered(x: Tensor) -> Tensor:
        once = convert(convert(x, Invariant(), Replicate(), group).tanh(), Replicate(), Partial(), group)
        return convert(convert(once, Partial(), shard, group), shard, Invariant(), group).pow(3).sum()

    for function in (gathered, used_differently, gathered_for_each, scattered):
        check(function, lambda x: x.tanh().pow(3).sum(), whole, f"{name}, {function.__name__}")
    if not is_shared:  # a sum over what several ranks hold counts it several times
        check(summed, lambda x: (x.tanh() @ weight).pow(3).sum(), whole, f"{name}, {summed.__name__}")


def penalties_on_conversions(rank: int, size: int) -> int:
    group = TPGroup.of(dist.group.WORLD)
    for name, ownership in maps(size).items():
        check_conversions(ownership, group, name)
    return len(maps(size))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_gradient_penalties_through_conversions(ranks: int) -> None:
    assert all(count == 6 for count in run_ranks(penalties_on_conversions, ranks))


def check_loss(ownership: Ownership, group: TPGroup, name: str) -> None:
    shard = Shard(((1, ownership),))
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(5, ownership.size, generator=generator, dtype=torch.double)
    target = torch.tensor([0, 1, -100, 2, 1])
    weight = torch.rand(ownership.size, generator=generator, dtype=torch.double) + 0.1
    every: list[dict[str, Any]] = [{}, {"label_smoothing": 0.3, "weight": weight}, {"reduction": "sum"}]
    for options in every:

        def divided(x: Tensor, options: dict[str, Any] = options) -> Tensor:
            local = convert(x, Invariant(), shard, group)
            return vocab_parallel_cross_entropy(local, target, ownership, group, **options)

        def truth(x: Tensor, options: dict[str, Any] = options) -> Tensor:
            return F.cross_entropy(x, target, **options)

        check(divided, truth, whole, f"{name}, {options}")


def penalties_on_the_loss(rank: int, size: int) -> int:
    group = TPGroup.of(dist.group.WORLD)
    for name, ownership in maps(size).items():
        check_loss(ownership, group, name)
    return len(maps(size))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_gradient_penalties_through_the_vocabulary_parallel_loss(ranks: int) -> None:
    assert all(count == 6 for count in run_ranks(penalties_on_the_loss, ranks))
