"""The divergence between vocabulary-sharded logits of a student and a teacher, against one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from shards import maps
from torch import Tensor
from torch.nn import functional as F

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Shard
from lightning_autotp.losses import kl_divergence
from lightning_autotp.parallel import TPGroup, VocabParallelLogits, convert


def truth(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def example(classes: int, dtype: torch.dtype = torch.double) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(classes)
    return tuple(4 * torch.randn(2, 5, classes, generator=generator, dtype=torch.double).to(dtype) for _ in "st")  # type: ignore[return-value]


def derivatives(of: Any, student: Tensor, teacher: Tensor) -> list[Tensor]:
    """The values, the gradients of both, and those of a penalty on the gradients."""
    both = [student.clone().requires_grad_(), teacher.clone().requires_grad_()]
    values = of(*both)
    scale = torch.randn(values.shape, generator=torch.Generator().manual_seed(9), dtype=torch.double)
    gradients = torch.autograd.grad((values.sin() * scale).sum(), both, create_graph=True)
    second = torch.autograd.grad(sum(gradient.pow(3).sum() for gradient in gradients), both)
    return [values.detach(), *(gradient.detach() for gradient in gradients), *second]


def ruled_out() -> tuple[Tensor, Tensor]:
    """One word has no probability for the teacher."""
    student, teacher = example(7)
    return student, teacher.index_fill(-1, torch.tensor([4]), -torch.inf)


def without(student: Tensor, teacher: Tensor) -> Tensor:
    """Likewise, by the definition over the other words."""
    others = torch.tensor([0, 1, 2, 3, 5, 6])
    p = teacher[..., others].log_softmax(-1)
    return (p.exp() * (p - student.log_softmax(-1)[..., others])).sum(-1)


def over_likeliest(student: Tensor, teacher: Tensor, k: int) -> Tensor:
    """By the definition: the probabilities of the teacher's ``k`` likeliest words, and of all others together."""
    p, q = teacher.softmax(-1), student.softmax(-1)
    rank = p.argsort(-1, descending=True).argsort(-1)
    parts = [[(x * (rank == at)).sum(-1) for at in range(k)] for x in (p, q)]
    if k < p.shape[-1]:
        for x, found in zip((p, q), parts, strict=True):
            found.append((x * (rank >= k)).sum(-1))
    return sum((a * (a / b).log() for a, b in zip(*parts, strict=True)), torch.zeros(()))


def on_every_map(rank: int, size: int) -> dict[str, Any]:
    group = TPGroup.of(dist.group.WORLD)  # type: ignore[arg-type]
    seen: dict[str, Any] = {}

    def cut(x: Tensor, ownership: Ownership) -> Tensor:
        shard = Shard(((x.dim() - 1, ownership),))
        return VocabParallelLogits(convert(x, Invariant(), shard, group), shard, group)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is gathered
        for name, ownership in maps(size).items():
            whole = example(ownership.size)
            seen[name] = derivatives(lambda s, t, o=ownership: kl_divergence(cut(s, o), cut(t, o)), *whole)
            seen[f"{name}, teacher whole"] = derivatives(lambda s, t, o=ownership: kl_divergence(cut(s, o), t), *whole)
            for k in (1, 3, ownership.size):
                seen[f"{name}, top {k}"] = derivatives(
                    lambda s, t, o=ownership, k=k: kl_divergence(cut(s, o), cut(t, o), top_k=k), *whole
                )
            low = example(ownership.size, torch.bfloat16)
            seen[f"{name}, bf16"] = kl_divergence(*(cut(x, ownership) for x in low))
    seen["ruled out"] = derivatives(
        lambda s, t: kl_divergence(cut(s, Ownership.even(7, size)), cut(t, Ownership.even(7, size))), *ruled_out()
    )
    even, other = Ownership.even(6, size), Ownership(6, tuple(reversed(Ownership.even(6, size).held)))
    student, teacher = example(6)
    for case, arguments in {
        "differently": (cut(student, even), cut(teacher, other)),
        "shape": (cut(student, even), cut(teacher, even)[:1]),
        "integers": (student.long(), teacher),
    }.items():
        with pytest.raises((ValueError, TypeError)) as raised:
            kl_divergence(*arguments)
        seen[case] = str(raised.value)
    return seen


@pytest.mark.parametrize("number", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_every_map_equals_one_process(number: int) -> None:
    for seen in run_ranks(on_every_map, number):
        for name, ownership in maps(number).items():
            wanted = derivatives(truth, *example(ownership.size))
            for case in (name, f"{name}, teacher whole"):
                for found, value in zip(seen[case], wanted, strict=True):
                    assert value.abs().max() > 0
                    torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-11)
            for k in (1, 3, ownership.size):
                wanted = derivatives(lambda s, t, k=k: over_likeliest(s, t, k), *example(ownership.size))
                for found, value in zip(seen[f"{name}, top {k}"], wanted, strict=True):
                    torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-11)
            low = truth(*(x.float() for x in example(ownership.size, torch.bfloat16)))
            torch.testing.assert_close(seen[f"{name}, bf16"], low, rtol=1e-5, atol=1e-5)
        for found, value in zip(seen["ruled out"], derivatives(without, *ruled_out()), strict=True):
            torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-11)
        assert "are divided differently" in seen["differently"]
        assert "must be of the same tokens and the same vocabulary" in seen["shape"]
        assert "logits are floating-point numbers" in seen["integers"]


def test_likeliest_words_of_whole_logits() -> None:
    student, teacher = example(7)
    for k in (1, 3, 7):
        found = derivatives(lambda s, t, k=k: kl_divergence(s, t, top_k=k), student, teacher)
        wanted = derivatives(lambda s, t, k=k: over_likeliest(s, t, k), student, teacher)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    for k in (0, 8):
        with pytest.raises(ValueError, match="it must be a number of words, from 1 to 7"):
            kl_divergence(student, teacher, top_k=k)


def test_whole_logits() -> None:
    student, teacher = example(7)
    torch.testing.assert_close(kl_divergence(student, teacher), truth(student, teacher))
    for found, value in zip(derivatives(kl_divergence, *ruled_out()), derivatives(without, *ruled_out()), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-11)
