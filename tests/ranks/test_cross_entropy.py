"""The vocabulary-parallel loss against ``F.cross_entropy`` on the whole logits, value and gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from shards import maps, part
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel import TPGroup, VocabParallelCrossEntropyLoss, vocab_parallel_cross_entropy


def check(
    group: TPGroup, ownership: Ownership, logits: Tensor, target: Tensor, what: str, loss: Any = None, **options: Any
) -> None:
    """Compare value and gradient; the truth is in fp32, and low-precision results may differ by their rounding."""
    dim = 0 if logits.dim() == 1 else 1
    shard = Shard(((dim, ownership),))
    exact = logits.float().clone().requires_grad_()
    truth = F.cross_entropy(exact, target, **options)
    upstream = torch.randn(truth.shape, generator=torch.Generator().manual_seed(9))
    truth.backward(upstream)
    mine = part(logits, shard, group.rank).requires_grad_()
    if loss is None:
        value = vocab_parallel_cross_entropy(mine, target, ownership, group, **options)
    else:
        value = loss(mine, target)
    assert value.dtype == logits.dtype
    value.backward(upstream.to(value.dtype))

    rounding = {torch.float32: 0.0, torch.float64: 0.0}.get(logits.dtype, torch.finfo(logits.dtype).eps)

    def say(text: str) -> str:
        return f"{what}: {text}"

    torch.testing.assert_close(
        value.float(), truth.float(), rtol=max(1e-5, rounding), atol=1e-6, equal_nan=True, msg=say
    )
    everyone = [torch.empty_like(value) for _ in range(group.size)]
    dist.all_gather(everyone, value.detach())
    assert all(torch.equal(other.nan_to_num(), everyone[0].nan_to_num()) for other in everyone), f"{what}: ranks differ"
    assert mine.grad is not None
    assert mine.grad.dtype == logits.dtype
    assert exact.grad is not None
    index = torch.tensor(ownership.indices(group.rank), dtype=torch.long)
    gradient = torch.zeros(logits.shape).index_add_(dim, index, mine.grad.float())
    dist.all_reduce(gradient)
    scale = exact.grad.abs().max().item()
    torch.testing.assert_close(
        gradient, exact.grad, rtol=max(1e-4, 4 * rounding), atol=max(1e-5, 4 * rounding) * scale, msg=say
    )
    valid = (target != options.get("ignore_index", -100)).any()
    assert not valid or scale > 0, f"{what}: nothing to compare"


def every_option(group: TPGroup, with_all: bool) -> int:
    """Every reduction with every smoothing, weights or none, ignored tokens (none, some, all), each kind of map.

    Not ``with_all``, a third: any two of them still meet, and with each kind of map another third.
    """
    generator = torch.Generator().manual_seed(0)
    count = 0
    for number, (name, ownership) in enumerate(maps(group.size).items()):
        classes = ownership.size
        logits = torch.randn(11, classes, generator=generator) * 3
        weights = torch.rand(classes, generator=generator) + 0.1
        some = torch.randint(0, classes, (11,), generator=generator)
        some[[2, 5, 6]] = -100
        targets = {"some": some, "none": some.clamp(min=0), "all": torch.full_like(some, -100)}
        choices: list[Sequence[Any]] = [("mean", "sum", "none"), (0.0, 0.3, 1.0), (None, weights), [*targets.items()]]
        for places in itertools.product(*(range(len(options)) for options in choices)):
            if not with_all and (number + sum(places)) % 3:
                continue
            chosen = (options[place] for options, place in zip(choices, places, strict=True))
            reduction, smoothing, weight, (ignored, target) = chosen
            what = f"{name}, {reduction}, smoothing {smoothing}, weight {weight is not None}, ignored {ignored}"
            options = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
            check(group, ownership, logits, target, what, **options)
            count += 1
    return count


def other_inputs(group: TPGroup) -> None:
    ownership = Ownership.even(131, group.size)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(13, 131, generator=generator)
    target = torch.randint(0, 131, (13,), generator=generator)
    weight = torch.rand(131, generator=generator)
    check(group, ownership, logits, target, "a class that is ignored", ignore_index=int(target[0]))
    for scale in (1e-4, 100.0, 1e4):
        for smoothing in (0.0, 0.1):
            what = f"logits up to {scale}"
            check(group, ownership, (logits / logits.abs().max()) * scale, target, what, label_smoothing=smoothing)
    opposite = torch.where(torch.arange(131) % 2 == 0, 1e4, -1e4).repeat(13, 1)
    check(group, ownership, opposite, target, "logits of 1e4 and -1e4", label_smoothing=0.1)
    masked = logits.masked_fill(torch.arange(131) >= 60, float("-inf"))
    check(group, ownership, masked, target % 60, "classes masked with -inf")
    for dtype in (torch.bfloat16, torch.float16):
        for reduction in ("mean", "none"):
            low = (logits * 4).to(dtype)
            check(group, ownership, low, target, f"{dtype}", reduction=reduction, label_smoothing=0.1, weight=weight)
    check(group, ownership, logits.double(), target, "float64", weight=None)
    for shape in ((), (2, 3), (4, 3, 2)):
        where = (*shape[:1], 131, *shape[1:])
        many = torch.randn(where, generator=generator)
        labels = torch.randint(0, 131, shape, generator=generator)
        for reduction in ("mean", "none"):
            options = {"reduction": reduction, "label_smoothing": 0.2, "weight": weight}
            check(group, ownership, many, labels, f"shape {where}", **options)
    module = VocabParallelCrossEntropyLoss(ownership, group, weight, ignore_index=3, label_smoothing=0.1)
    assert isinstance(module, nn.CrossEntropyLoss)
    options = {"weight": weight, "ignore_index": 3, "label_smoothing": 0.1}
    check(group, ownership, logits, target, "the module", module, **options)
    low = part(logits.bfloat16(), Shard(((1, ownership),)), group.rank)
    with torch.autocast("cpu", torch.bfloat16):
        value = vocab_parallel_cross_entropy(low, target, ownership, group)
        truth = F.cross_entropy(logits.bfloat16(), target)
    assert value.dtype == truth.dtype == torch.float32
    torch.testing.assert_close(value, truth, rtol=1e-5, atol=0)


def bad_targets(group: TPGroup) -> None:
    """Every rank says so, whoever would own the class: the others would wait."""
    ownership = Ownership.even(7, group.size)
    logits = torch.zeros(2, ownership.local_size(group.rank))
    for bad in (7, -1, -100):
        with pytest.raises(IndexError, match=rf"in \[0, 7\), or ignore_index=-5; found {bad}"):
            vocab_parallel_cross_entropy(logits, torch.tensor([0, bad]), ownership, group, ignore_index=-5)


def compiled(group: TPGroup) -> None:
    ownership = maps(group.size)["shared"]
    options = {"label_smoothing": 0.1, "weight": torch.arange(1.0, 7.0)}
    function = torch.compile(vocab_parallel_cross_entropy, fullgraph=True, backend="aot_eager")
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
    target = torch.tensor([0, 5, -100, 2, 3])
    check(
        group,
        ownership,
        logits,
        target,
        "compiled",
        lambda x, y: function(x, y, ownership, group, **options),
        **options,
    )


def every_check(rank: int, ranks: int, with_all: bool) -> int:
    group = TPGroup.of(dist.group.WORLD)
    count = every_option(group, with_all)
    other_inputs(group)
    bad_targets(group)
    if ranks == 2:
        compiled(group)
    return count


@pytest.mark.parametrize(
    ("ranks", "with_all"), [(3, False), *(pytest.param(ranks, True, marks=pytest.mark.nightly) for ranks in (2, 3))]
)
def test_the_loss_is_that_of_the_whole_logits(ranks: int, with_all: bool) -> None:
    assert run_ranks(every_check, ranks, with_all) == [6 * 3 * 3 * 2 * (3 if with_all else 1)] * ranks


GROUP = TPGroup("", 0, 2)
SEVEN = Ownership.even(7, 2)


@pytest.mark.parametrize(("reduction", "shape"), [("mean", []), ("sum", []), ("none", [5, 3])])
def test_on_meta_the_loss_is_one_node(reduction: str, shape: list[int]) -> None:
    class Loss(nn.Module):
        def forward(self, logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
            return vocab_parallel_cross_entropy(logits, target, SEVEN, GROUP, weight, reduction=reduction)

    inputs = torch.empty(5, 4, 3), torch.empty(5, 3, dtype=torch.long), torch.empty(7)
    graph = torch.export.export(Loss(), tuple(x.to("meta") for x in inputs), strict=False).graph
    *placeholders, node, _ = graph.nodes
    assert node.args == ("vocab_parallel_cross_entropy", placeholders, shape, SEVEN.digest)


def test_what_does_not_fit_is_said() -> None:
    logits, target = torch.zeros(5, 4), torch.zeros(5, dtype=torch.long)

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        return vocab_parallel_cross_entropy(*args[:2], SEVEN, GROUP, **kwargs)

    with pytest.raises(ValueError, match="should have this rank's 4 of 7 classes in dim 1"):
        loss(torch.zeros(5, 7), target)
    with pytest.raises(ValueError, match="probabilities need whole logits"):
        loss(logits, torch.zeros(5, 7))
    with pytest.raises(ValueError, match=r"need \(5,\)"):
        loss(logits, target[:4])
    with pytest.raises(ValueError, match="one weight for each of 7 classes"):
        loss(logits, target, weight=torch.ones(4))
    with pytest.raises(ValueError, match="detach them"):
        loss(logits, target, weight=torch.ones(7, requires_grad=True))
    with pytest.raises(ValueError, match="not 'median'"):
        loss(logits, target, reduction="median")
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\]"):
        loss(logits, target, label_smoothing=1.5)
