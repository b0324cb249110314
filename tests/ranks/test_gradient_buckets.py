"""Gradients of whole parameters that are terms of a sum are summed in buckets, once for an optimizer's step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import PATIENCE, run_ranks
from local_model import state_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_autotp import parallelize
from lightning_autotp.gradients.norms import full_gradients
from lightning_autotp.gradients.sums import (
    average_gradients,
    hook_parameters,
    postponed_sums,
    sum_at_once_in_ddp,
    synchronize_gradients,
)
from lightning_autotp.layouts import buckets
from lightning_autotp.layouts.types import Invariant, Replicate
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.private.distributed_private import default_store
from lightning_autotp.ranks import store_barrier
from lightning_autotp.ranks.group import TPGroup

Found = dict[str, Tensor]


class Scales(nn.Module):
    """Vectors of two dtypes, of which all but ``alike`` are used differently on every rank."""

    def __init__(self) -> None:
        super().__init__()
        for index, name in enumerate(("a", "b", "c", "unused", "alike")):
            setattr(self, name, nn.Parameter(torch.arange(3.0 + index).add(index)))
        self.low = nn.Parameter(torch.arange(4.0).to(torch.bfloat16))

    def forward(self, factor: float, rank: int) -> Tensor:
        own = factor * (rank + 1)
        terms = ((getattr(self, name).float() ** 2).sum() * own for name in ("a", "b", "c", "low"))
        return sum(terms, (self.alike**2).sum() * factor)


class Sums(TorchDispatchMode):
    """Counts all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "allreduce_"
        return func(*args, **(kwargs or {}))


def made() -> nn.Module:
    group = TPGroup.of(dist.group.WORLD)  # type: ignore[arg-type]
    model = Scales()
    model.autotp = state_of(model, group, lambda name, _: Invariant() if name == "alike" else Replicate())  # type: ignore[assignment]
    synchronize_gradients(model)
    model.register_forward_pre_hook(before_forward)
    return model


def before_forward(model: nn.Module, _: Any) -> None:
    """What the guard of a parallel model does for its gradients."""
    sum_at_once_in_ddp(model)
    hook_parameters(model, parallel_state(model).places(model))


class Low(nn.Module):
    """Vectors of bfloat16, whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("together", "at_once", "averaged"):
            setattr(self, name, nn.Parameter(torch.zeros(500, dtype=torch.bfloat16)))

    def forward(self, given: Tensor) -> Tensor:
        return sum((parameter * given).sum() for parameter in self.parameters())  # type: ignore[return-value]


def given(rank: int) -> Tensor:
    return torch.randn(500, generator=torch.Generator().manual_seed(rank)).bfloat16()


def in_low_precision(rank: int, size: int) -> Found:
    group = dist.group.WORLD
    model = Low()
    kinds = {"averaged": Invariant()}
    model.autotp = state_of(model, TPGroup.of(group), lambda name, _: kinds.get(name, Replicate()))  # type: ignore
    synchronize_gradients(model)
    average_gradients(nn.ParameterList([model.averaged]), group)  # type: ignore[arg-type]
    model.at_once.register_hook(lambda gradient: None)
    model(given(rank)).backward()
    return gradients(model)


def test_gradients_of_bfloat16_are_rounded_once_when_they_are_summed() -> None:
    total = sum(given(rank).float() for rank in range(3))
    assert isinstance(total, Tensor)
    by_steps = given(0) + given(1) + given(2)
    assert not torch.equal(by_steps, total.bfloat16())
    for found in run_ranks(in_low_precision, 3):
        assert torch.equal(found["together"], total.bfloat16())
        assert torch.equal(found["at_once"], total.bfloat16())
        torch.testing.assert_close(found["averaged"].float(), total / 3, rtol=2**-8, atol=0)  # half of a last place


def gradients(model: nn.Module) -> Found:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Each way takes a model and its rank, and gives gradients. Alone, rank is that of all of them together: see alone().
def once(model: nn.Module, rank: int) -> Found:
    model(1.0, rank).backward()
    return gradients(model)


def twice(model: nn.Module, rank: int) -> Found:
    """Two passes before the step: the first one's sums are not summed again, and keep their object."""
    model(1.0, rank).backward()
    before = model.a.grad
    model(2.0, rank).backward()
    assert model.a.grad is before
    return gradients(model)


def postponed(model: nn.Module, rank: int) -> Found:
    for factor in (1.0, 2.0, 3.0, 4.0):
        with postponed_sums(model) if factor < 4 else nullcontext():
            model(factor, rank).backward()
    return gradients(model)


def postponed_after_a_sum(model: nn.Module, rank: int) -> Found:
    model(1.0, rank).backward()
    with postponed_sums(model):
        model(2.0, rank).backward()
    model(3.0, rank).backward()
    return gradients(model)


def read_in_between(model: nn.Module, rank: int) -> Found:
    """What is read is summed, with all that waits; what comes after is added to it. An object stays what it is."""
    found: Found = {}
    for index in range(4):
        with postponed_sums(model) if index < 3 else nullcontext():
            model(float(index + 1), rank).backward()
        if index in (0, 2):
            held = model.a.grad
            assert model.b.grad is not None
            found[f"{index}"] = model.b.grad.clone()
            found[f"{index} norm"] = model.c.grad.norm()  # type: ignore[union-attr]
            assert held is not None
            found[f"{index} held"] = held.clone()
            assert held.data_ptr() == model.a.grad.data_ptr()  # type: ignore[union-attr]
            held.mul_(2)
    return {**gradients(model), **found}


def read_in_lists(model: nn.Module, rank: int) -> Found:
    """By functions of lists of tensors; an optimizer's step."""
    with postponed_sums(model):
        model(1.0, rank).backward()
        norm = torch.nn.utils.clip_grad_norm_([model.a, model.b, model.c], 1.0)
        model(1.0, rank).backward()
        torch.optim.SGD(model.parameters(), lr=0.0, foreach=True).step()
        model(1.0, rank).backward()
        torch.optim.SGD(model.parameters(), lr=0.0).zero_grad(set_to_none=False)
        model(1.0, rank).backward()
        torch.optim.Adam(model.parameters(), foreach=True).zero_grad(set_to_none=False)
    model(1.0, rank).backward()
    return {**gradients(model), "norm": norm}


def of_functions_of_gradients(model: nn.Module, rank: int) -> Found:
    """Functions of this package read what waits."""
    with postponed_sums(model):
        model(1.0, rank).backward()
        found = full_gradients(model) if hasattr(model, "autotp") else gradients(model)
        model(1.0, rank).backward()
    model(1.0, rank).backward()
    return {**gradients(model), **{f"first {name}": found[name] for name in ("a", "alike", "low")}}


def left_to_a_pass_without_it(model: nn.Module, rank: int) -> Found:
    """What was postponed is summed by a pass that has no gradient for it."""
    with postponed_sums(model):
        model(2.0, rank).backward()
    (model.a.sum() * (rank + 1)).backward()
    return gradients(model)


def hooked_meanwhile(model: nn.Module, rank: int) -> Found:
    """A user's hook, which must see the sum, comes after passes whose sums were postponed."""
    with postponed_sums(model):
        model(1.0, rank).backward()
    seen: list[Tensor] = []
    model.a.register_hook(lambda gradient: seen.append(gradient.clone()))
    model(2.0, rank).backward()
    return {**gradients(model), "seen": seen[0]}


def stepped_in_the_pass(model: nn.Module, rank: int) -> Found:
    seen: Found = {}

    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen["b"] = parameter.grad.clone()
        parameter.grad = None

    model.b.register_post_accumulate_grad_hook(note)
    model(2.0, rank).backward()
    return {**gradients(model), **seen}


def zeroed(model: nn.Module, rank: int) -> Found:
    """What was postponed and then zeroed is gone, with what was summed before."""
    for to_none in (False, True):
        model(5.0, rank).backward()
        with postponed_sums(model):
            model(7.0, rank).backward()
        model.zero_grad(set_to_none=to_none)
    model(2.0, rank).backward()
    return gradients(model)


def of_functions(model: nn.Module, rank: int) -> Found:
    model(1.0, rank).backward()
    found = torch.autograd.grad(model(2.0, rank), [model.a, model.low])
    return {**gradients(model), "first": found[0], "second": found[1]}


def with_inputs(model: nn.Module, rank: int) -> Found:
    model(1.0, rank).backward(inputs=[model.a, model.c])
    return gradients(model)


def retained(model: nn.Module, rank: int) -> Found:
    loss = model(1.0, rank)
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def penalized(model: nn.Module, rank: int) -> Found:
    """A penalty on summed gradients, which every rank computes alike."""
    found = torch.autograd.grad(model(1.0, rank), [model.a, model.b], create_graph=True)
    sum(gradient.pow(2).sum() for gradient in found).backward()
    return gradients(model)


def recomputed(model: nn.Module, rank: int) -> Found:
    """A pass within the pass."""
    x = torch.ones((), requires_grad=True)
    checkpoint(lambda x: model(1.0, rank) * x, x, use_reentrant=True).backward()  # type: ignore[union-attr]
    return gradients(model)


def copied(model: nn.Module, rank: int) -> Found:
    model(1.0, rank).backward()
    model = copy.deepcopy(model)
    with postponed_sums(model):
        model(1.0, rank).backward()
    model(2.0, rank).backward()
    return gradients(model)


def failed(model: nn.Module, rank: int) -> Found:
    """A pass fails; the next one is as if it had not been."""

    def fail(_: Tensor) -> None:
        raise ValueError

    handle = model.alike.register_hook(fail)
    with pytest.raises(ValueError):  # noqa: PT011
        model(1.0, rank).backward()
    handle.remove()
    model.zero_grad()
    model(2.0, rank).backward()
    return gradients(model)


def within_ddp(model: nn.Module, rank: int) -> Found:
    """DistributedDataParallel copies what it has seen into the gradients at the end of a pass."""
    if hasattr(model, "autotp"):
        groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
        wrapped = DistributedDataParallel(model, process_group=groups[rank], find_unused_parameters=True)
        wrapped(1.0, rank).backward()
    else:
        model(1.0, rank).backward()
    return {name: gradient for name, gradient in gradients(model).items() if name != "unused"}


def refused_ddp(size: int) -> str:
    """What is said where DistributedDataParallel is put around a model whose parts its ranks have."""
    model = nn.Sequential(nn.Linear(8, 8 * size), nn.ReLU(), nn.Linear(8 * size, 8))
    parallelize(model, dist.group.WORLD, example_inputs=torch.zeros(3, 8))  # type: ignore[arg-type]
    try:
        DistributedDataParallel(model)(torch.ones(3, 8))
    except RuntimeError as error:
        return str(error)
    return ""


# all-reduces over two ranks: one for each dtype and pass that sums
WAYS: dict[Callable[[nn.Module, int], Found], int] = {
    once: 2, twice: 4, postponed: 2, postponed_after_a_sum: 4, left_to_a_pass_without_it: 2, stepped_in_the_pass: 3,
    with_inputs: 1, retained: 4, recomputed: 2, failed: 2, copied: 4, zeroed: 6,
    hooked_meanwhile: 4, of_functions: 4, read_in_between: 6, read_in_lists: 8, of_functions_of_gradients: 4,
}  # fmt: skip


OTHERS = [penalized, within_ddp]


def on_every_rank(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in (*WAYS, *OTHERS):
        with Sums() as sums:
            found[way.__name__] = way(made(), rank), sums.count
    with mock.patch.object(buckets, "BUCKET_BYTES", 20), Sums() as sums:
        found["small buckets"] = once(made(), rank), sums.count
    found["refused"] = refused_ddp(size)
    return found


def alone(way: Callable[[nn.Module, int], Found], size: int) -> Found:
    """One process: the factor of all ranks together."""
    return way(Scales(), size * (size + 1) // 2 - 1)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_sums_are_one_process_gradients(size: int) -> None:
    for found in run_ranks(on_every_rank, size):
        for way, count in WAYS.items():
            seen, sums = found[way.__name__]
            wanted = alone(way, size)
            assert seen.keys() == wanted.keys(), way.__name__
            for name, gradient in wanted.items():
                assert type(seen[name]) is Tensor
                assert torch.equal(seen[name], gradient), f"{way.__name__}: {name}: {seen[name]}, not {gradient}"
            assert sums == count, way.__name__
        for way in OTHERS:
            seen, _ = found[way.__name__]
            assert all(torch.equal(seen[name], gradient) for name, gradient in alone(way, size).items()), way.__name__
        seen, sums = found["small buckets"]
        assert all(torch.equal(seen[name], gradient) for name, gradient in alone(once, size).items())
        assert sums == 3  # a and b, c; low
        assert "is inside a DistributedDataParallel over ranks [0, 1" in found["refused"]
        assert "lightning_autotp.AutoTPTrainerMixin" in found["refused"]
        assert "transformers' Trainer" in found["refused"]


def misreading(rank: int, size: int) -> dict[str, str]:
    """What is said where a gradient cannot be read; a rank's term is only shown."""
    said: dict[str, str] = {}

    def reads(name: str, model: nn.Module, gradient: Tensor | None = None) -> None:
        with pytest.raises(RuntimeError) as caught:
            (model.a.grad if gradient is None else gradient).norm()  # type: ignore[union-attr]
        said[name] = str(caught.value)

    def fail(_: Tensor) -> None:
        reads("in the pass", model)
        raise ValueError

    model = made()
    model.alike.register_hook(fail)
    with pytest.raises(ValueError):  # noqa: PT011
        model(1.0, rank).backward()
    reads("after it failed", model)

    model = made()
    with postponed_sums(model):
        model(1.0, rank).backward()
        gradient = model.a.grad
        assert gradient is not None
        said["shown"] = f"{gradient} {gradient!r}"
        assert gradient.shape == (3,)
        model.zero_grad()
        reads("taken away", model, gradient)
        model(1.0, rank).backward()
    default_store().set_timeout(timedelta(seconds=1))
    with mock.patch.object(store_barrier, "PATIENCE", 0.2):
        if rank == 0:
            reads("on one rank", model)
    default_store().set_timeout(timedelta(seconds=PATIENCE))
    dist.barrier()
    assert torch.equal(model.a.grad, 2 * model.a * 3)  # type: ignore[arg-type]
    return said


def test_who_cannot_read_is_told() -> None:
    first, second = run_ranks(misreading, 2)
    assert "on rank 0, but not on 1 of the ranks [0, 1]" in first.pop("on one rank")
    for said in (first, second):
        shown = said.pop("shown")
        assert shown.count("this rank's term of the gradient of a: tensor([0., ") == 2
        assert len(said) == 3
        for text in said.values():
            assert "norm: the gradient of a is not summed over the ranks" in text
