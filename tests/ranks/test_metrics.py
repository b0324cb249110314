"""Metrics of vocabulary-sharded logits: torchmetrics' values on the whole logits, and no more than tokens travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import part
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity as TorchPerplexity
from wire import Wire

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.metrics import CrossEntropy, Perplexity, TokenAccuracy
from lightning_autotp.parallel import TPGroup, VocabParallelLogits

VOCAB = 67


def sharded(logits: Tensor, ownership: Ownership, group: TPGroup) -> VocabParallelLogits:
    shard = Shard(((logits.dim() - 1, ownership),))
    return VocabParallelLogits(part(logits, shard, group.rank), shard, group)


def ownerships(ranks: int) -> list[Ownership]:
    """Uneven; a rank with nothing; several runs, and classes that two ranks hold."""
    maps = [Ownership.even(VOCAB, ranks), Ownership(VOCAB, (((0, VOCAB),), *[()] * (ranks - 1)))]
    rest = [((30, 41),)] * (ranks - 2)
    return [*maps, Ownership(VOCAB, (((0, 20), (50, 67)), ((10, 60),), *rest))]


def batch(seed: int, shape: tuple[int, ...], dtype: torch.dtype, ties: bool) -> tuple[Tensor, Tensor]:
    """Logits, and targets of which some are -100 and many are among the best classes."""
    generator = torch.Generator().manual_seed(seed)
    # Without ties, also after rounding to bf16: the same numbers in another order for every token.
    logits = torch.rand(*shape, VOCAB, generator=generator).argsort(-1) / 8 - 4
    if ties:
        logits = logits.round()
    best = logits.topk(6, dim=-1).indices
    choice = torch.randint(0, 6, (*shape, 1), generator=generator)
    target = torch.where(
        torch.rand(shape, generator=generator) < 0.7,
        best.gather(-1, choice).squeeze(-1),
        torch.randint(0, VOCAB, shape, generator=generator),
    )
    return logits.to(dtype), target.masked_fill(torch.rand(shape, generator=generator) < 0.2, -100)


def among_the_best(logits: Tensor, target: Tensor, k: int, ignore_index: int | None) -> float:
    """The share, by a stable sort: of equal logits the lower class comes first."""
    order = logits.flatten(0, -2).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    kept = torch.ones_like(target.flatten(), dtype=torch.bool)
    if ignore_index is not None:
        kept = target.flatten() != ignore_index
    return (order == target.flatten().unsqueeze(1)).any(1)[kept].float().mean().item()


CASES = (
    ((3, 11), torch.float32, False),
    ((29,), torch.float32, True),
    ((29,), torch.bfloat16, False),
    ((3, 11), torch.float64, True),
)


def every_case(rank: int, ranks: int) -> int:
    group = TPGroup.of(dist.group.WORLD)
    owned, done = ownerships(ranks), 0
    for number, (shape, dtype, ties) in enumerate(CASES):
        batches = [batch(100 * number + at, shape, dtype, ties) for at in range(2)]
        batches[1] = batches[1][0][:2], batches[1][1][:2]  # a batch of another size
        for ignore_index in (-100, None, 5):
            if ignore_index != -100:
                batches = [(logits, target.abs() % VOCAB) for logits, target in batches]
            compare(group, owned, batches, ignore_index, ties, f"{shape}, {dtype}, ties={ties}")
            done += len(owned)
    return done


def metrics_of(ignore_index: int | None) -> dict[str, Any]:
    return {
        "loss": CrossEntropy(ignore_index),
        "perplexity": Perplexity(ignore_index),
        **{f"top {k}": TokenAccuracy(k, ignore_index) for k in (1, 2, 5, VOCAB)},
    }


def compare(
    group: TPGroup,
    owned: list[Ownership],
    batches: list[tuple[Tensor, Tensor]],
    ignore_index: int | None,
    ties: bool,
    what: str,
) -> None:
    """Ours on sharded and on whole logits, torchmetrics' on whole ones; batch by batch and over all batches."""
    ours, on_whole = [metrics_of(ignore_index) for _ in owned], metrics_of(ignore_index)
    theirs: dict[str, Any] = {"perplexity": TorchPerplexity(ignore_index)} | {
        f"top {k}": MulticlassAccuracy(VOCAB, top_k=k, average="micro", ignore_index=ignore_index) for k in (1, 2, 5)
    }

    def check(found: list[Tensor], wanted: Tensor, rtol: float, name: str) -> None:
        for one, ownership in zip(found, owned, strict=True):
            torch.testing.assert_close(
                one, wanted, rtol=rtol, atol=0, msg=lambda m, o=ownership: f"{o}, {what} {name}: {m}"
            )

    for logits, target in batches:
        parts = [sharded(logits, ownership, group) for ownership in owned]
        exact = logits.double() if logits.dtype == torch.float64 else logits.float()
        for name in on_whole:
            steps = [metrics[name](mine, target) for metrics, mine in zip(ours, parts, strict=True)]
            assert all(step.dtype == torch.float32 for step in steps)
            check(steps, on_whole[name](logits, target), 1e-6, name)  # the sums are made in another order
            if name in theirs and not (ties and name != "top 1" and name.startswith("top")):
                rows = exact.unsqueeze(0) if exact.dim() == 2 else exact
                truth = (
                    theirs[name](rows, target.view(rows.shape[:-1]))
                    if name == "perplexity"
                    else theirs[name](exact.flatten(0, -2), target.flatten())
                )
                check(steps, truth.float(), 2e-6, name)
    whole = torch.cat([logits.flatten(0, -2) for logits, _ in batches])
    target = torch.cat([target.flatten() for _, target in batches])
    for name in on_whole:
        totals = [metrics[name].compute() for metrics in ours]
        if name == "loss":
            ignored = {} if ignore_index is None else {"ignore_index": ignore_index}
            exact = whole.to(torch.promote_types(whole.dtype, torch.float32))
            truth = F.cross_entropy(exact, target, **ignored).float()
        elif name == "perplexity" or (name in theirs and not ties):
            truth = theirs[name].compute().float()
        else:
            truth = torch.tensor(among_the_best(whole, target, int(name.split()[1]), ignore_index))
        check(totals, truth, 2e-6, name)
        total = torch.stack(totals)
        everyone = [torch.empty_like(total) for _ in range(group.size)]
        dist.all_gather(everyone, total)
        assert all(torch.equal(one, total) for one in everyone), f"{what}: the ranks differ"


def bytes_on_the_wire(rank: int, ranks: int) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """What each metric sends for 3 x 11 tokens; the state is not synchronized (one data-parallel rank)."""
    group = TPGroup.of(dist.group.WORLD)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        logits, target = batch(0, (3, 11), dtype, ties=False)
        mine = sharded(logits, Ownership.even(VOCAB, ranks), group)
        metrics = {
            "loss": CrossEntropy(-100),
            "perplexity": Perplexity(-100),
            "top 1": TokenAccuracy(1, -100),
            "top 5": TokenAccuracy(5, -100),
        }
        for name, metric in metrics.items():
            with Wire() as wire:
                metric.update(mine, target)
            found[f"{name} {dtype}"] = dict(wire.calls), dict(wire.bytes)
    return found


def errors(rank: int, ranks: int) -> None:
    group = TPGroup.of(dist.group.WORLD)
    logits, target = batch(0, (3, 11), torch.float32, ties=False)
    mine = sharded(logits, Ownership.even(VOCAB, ranks), group)
    for metric in (Perplexity(), TokenAccuracy(), CrossEntropy()):
        with pytest.raises(ValueError, match=r"logits of shape \(3, 11, 67\) need targets of shape \(3, 11\)"):
            metric.update(mine, target.flatten())
        with pytest.raises(ValueError, match="the vocabulary must be the last dim"):
            metric.update(mine.transpose(1, 2), torch.zeros(3, VOCAB, dtype=torch.long))
        for bad in (-100, VOCAB):
            with pytest.raises(IndexError, match=rf"classes of the whole vocabulary, in \[0, 67\).*found {bad}"):
                metric.update(mine, torch.full((3, 11), bad))
        with pytest.raises(TypeError, match="targets are classes, integers"):
            metric.update(mine, target.float())
        with pytest.raises(TypeError, match="preds are logits"):
            metric.update(target.unsqueeze(-1), target)


def all_of_it(rank: int, ranks: int) -> tuple[int, Any]:
    torch.manual_seed(0)
    errors(rank, ranks)
    return every_case(rank, ranks), bytes_on_the_wire(rank, ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_sharded_logits_give_torchmetrics_values_and_send_tokens_only(ranks: int) -> None:
    tokens = 3 * 11
    for done, wire in run_ranks(all_of_it, ranks):
        assert done == 3 * len(CASES) * 3
        assert len(wire) == 8
        for name, (calls, sent) in wire.items():
            assert calls == {"all_reduce": 2}, name
            # The loss: the largest logit, and two sums; the accuracy: the target's logit in fp32, and a count.
            assert sent == {"all_reduce": tokens * (4 + 2 * 4 if "top" not in name else 4 + 8)}, name
            assert sent["all_reduce"] < tokens * VOCAB


@settings(max_examples=60)
@given(st.integers(0, 2**20), st.integers(1, 9), st.integers(1, 7), st.booleans(), st.sampled_from([None, -100, 0, 3]))
def test_the_best_classes_by_sorting(seed: int, classes: int, k: int, ties: bool, ignore_index: int | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(17, classes, generator=generator) * 2
    if ties:
        logits = logits.round()
    target = torch.randint(0, classes, (17,), generator=generator)
    target[0] = classes - 1
    if ignore_index is not None:
        target[1:5] = ignore_index
    metric = TokenAccuracy(k, ignore_index)
    metric.update(logits, target)
    wanted = among_the_best(logits, target, k, ignore_index)
    if wanted != wanted:  # no tokens
        assert metric.compute() == 0
    else:
        assert metric.compute().item() == pytest.approx(wanted, rel=1e-6)


def test_no_tokens() -> None:
    logits, target = torch.randn(4, VOCAB), torch.full((4,), -100)
    for metric, theirs in (
        (Perplexity(-100), TorchPerplexity(-100)),
        (TokenAccuracy(1, -100), MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100)),
    ):
        metric.update(logits, target)
        theirs.update(*((logits[None], target[None]) if isinstance(theirs, TorchPerplexity) else (logits, target)))
        torch.testing.assert_close(metric.compute(), theirs.compute().float(), equal_nan=True)


def test_nan_is_never_right() -> None:
    logits = torch.tensor([[0.0, float("nan"), 1.0], [3.0, 1.0, 0.0]])
    metric = TokenAccuracy()
    for target in ([2, 0], [1, 0]):
        metric.reset()
        metric.update(logits, torch.tensor(target))
        assert metric.compute() == 0.5


def test_states_keep_their_precision_and_belong_to_no_checkpoint() -> None:
    metrics = MetricCollection({"loss": CrossEntropy(), "best": TokenAccuracy(3)})
    for convert in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.set_dtype(torch.bfloat16)):
        converted = convert(metrics.clone())
        logits = torch.randn(1000, VOCAB, generator=torch.Generator().manual_seed(0))
        target = torch.randint(0, VOCAB, (1000,), generator=torch.Generator().manual_seed(1))
        for _ in range(30):
            converted.update(logits, target)
        found = converted.compute()
        assert converted["loss"].total.dtype == torch.float64
        assert found["loss"].item() == pytest.approx(F.cross_entropy(logits, target).item(), rel=1e-6)
        assert found["best"].item() == pytest.approx(among_the_best(logits, target, 3, None), rel=1e-6)
        assert not converted.state_dict()
        converted.reset()
        assert converted["loss"].total.dtype == torch.float64


def test_top_k_is_positive() -> None:
    with pytest.raises(ValueError, match="top_k must be at least 1, not 0"):
        TokenAccuracy(0)


def test_evaluated_in_inference_mode_and_trained_on() -> None:
    """A state that was reset in inference mode is none that a training step may not change."""
    metric = Perplexity()
    logits, target = torch.zeros(4, VOCAB), torch.arange(4)
    with torch.inference_mode():
        metric.update(logits, target)
        metric.reset()
        metric.update(logits, target)
    metric.update(logits.requires_grad_(), target)
    assert metric.compute().item() == pytest.approx(VOCAB)
    assert not metric.compute().requires_grad
