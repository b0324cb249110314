"""TRL's loss functions on sharded logits: what they give on whole ones, and nothing is gathered."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from shards import part
from torch import Tensor

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel import TPGroup, VocabParallelLogits

pytest.importorskip("trl", reason="TRL needs Python 3.11")

VOCAB, IGNORED = 11, -100
LABELS = torch.tensor([[0, 6, IGNORED, 2, 10], [1, IGNORED, 3, 4, 4]])
CHOSEN = LABELS.clamp(min=0)


def losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """By name: a function of a policy's (or student's) logits and a reference's (or teacher's)."""
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.orpo import ORPOTrainer
    from trl.experimental.sdpo import loss_utils
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax, selective_log_softmax_and_entropy

    divergence = GKDTrainer.generalized_jsd_loss
    return {
        "log-probabilities": lambda x, _: selective_log_softmax(x, CHOSEN, temperature=0.7),
        "of several tokens": lambda x, _: selective_log_softmax(x, torch.stack([CHOSEN, CHOSEN.roll(1, 1)], -1)),
        "in bf16": lambda x, _: selective_log_softmax(x.bfloat16(), CHOSEN),
        "entropy": lambda x, _: entropy_from_logits(x, chunk_size=3),
        "both": lambda x, _: torch.stack(selective_log_softmax_and_entropy(x, CHOSEN, row_mask=LABELS != IGNORED)),
        "sequences": lambda x, _: ORPOTrainer.get_batch_logps(x, LABELS, average_log_prob=True),
        "forward divergence": lambda x, y: divergence(x, y, LABELS, beta=0),
        "reverse divergence": lambda x, y: divergence(x, y, beta=1, temperature=2.0),
        "mixture": lambda x, y: divergence(x, y, LABELS, beta=0.3, temperature=0.9),
        "divergence a token": lambda x, y: divergence(x, y, beta=0.5, reduction="sum"),
        "likeliest words": lambda x, y: loss_utils.compute_topk_self_distillation_loss(
            x, y, distillation_topk=4, distillation_alpha=0.5, distillation_add_tail=True
        ),
        "all words": lambda x, y: loss_utils.compute_full_logit_self_distillation_loss(x, y, distillation_alpha=0.5),
    }


def logits(seed: int) -> Tensor:
    return torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(seed))


def every_loss(rank: int, ranks: int) -> list[str]:
    group, ownership = TPGroup.of(dist.group.WORLD), Ownership.even(VOCAB, ranks)
    shard = Shard(((2, ownership),))
    for name, loss in losses().items():
        whole, teacher = logits(0).requires_grad_(), logits(1)
        local = part(logits(0), shard, rank).requires_grad_()
        truth = loss(whole, teacher)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # gathering is said in a warning
            found = loss(
                VocabParallelLogits(local, shard, group), VocabParallelLogits(part(teacher, shard, rank), shard, group)
            )
        rounding = {"rtol": 2**-6, "atol": 2**-7} if "bf16" in name else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(found, truth, **rounding, msg=lambda text, name=name: f"{name}: {text}")
        truth.sum().backward()
        found.sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(
            local.grad, part(whole.grad, shard, rank), **rounding, msg=lambda text, name=name: f"{name}: {text}"
        )
    return list(losses())


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_losses_on_sharded_logits_are_those_on_whole_ones(ranks: int) -> None:
    assert len(run_ranks(every_loss, ranks)[0]) == 12
