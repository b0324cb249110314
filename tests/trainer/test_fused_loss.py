"""The head and the loss in parts, against ``F.cross_entropy`` of ``F.linear`` in one process."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from shards import maps, part
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler
from trainer_ranks import run_trainer_ranks

from lightning_autotp import AutoTPStrategy, full_gradients, parallelize
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.losses import token_log_probs
from lightning_autotp.parallel import TPGroup, VocabParallelLogits, linear_cross_entropy
from lightning_autotp.parallel.head import VocabParallelHead
from lightning_autotp.parallel.head_product import compute_undone, note_written

BATCH, LENGTH, HIDDEN = 2, 9, 4
Loss = Callable[[Tensor, Tensor], Any]


class Whole(nn.Module):
    """What one process has."""

    def __init__(self, classes: int, dtype: torch.dtype = torch.double, bias: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(classes)
        self.head = nn.Linear(HIDDEN, classes, bias, dtype=dtype)
        for parameter in self.head.parameters():
            parameter.data = 2 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
        self.hidden = nn.Parameter(torch.randn(BATCH, LENGTH, HIDDEN, generator=generator, dtype=dtype))
        self.targets = torch.randint(0, classes, (BATCH, LENGTH), generator=generator)
        self.targets[0, 2:5] = -100


class Divided(nn.Module):
    """The same with this rank's part of the head."""

    def __init__(self, whole: Whole, ownership: Ownership, group: TPGroup) -> None:
        super().__init__()
        has_bias = whole.head.bias is not None
        self.head = VocabParallelHead(HIDDEN, ownership.size, ownership, group, has_bias, dtype=whole.head.weight.dtype)
        for mine, original in zip(self.head.parameters(), whole.head.parameters(), strict=True):
            mine.data = part(original.data, Shard(((0, ownership),)), group.rank)
        self.hidden = nn.Parameter(whole.hidden.detach().clone())
        self.targets = whole.targets
        self.ownership, self.rank = ownership, group.rank

    def same(self, gradients: list[Tensor], wanted: list[Tensor], say: Any, **close: Any) -> None:
        """Whether hidden states, weight and bias have one process's gradients, all or this rank's rows."""
        rows = Shard(((0, self.ownership),))
        for place, (found, whole) in enumerate(zip(gradients, wanted, strict=True)):
            truth = whole if place == 0 else part(whole, rows, self.rank)
            if place and self.ownership.is_shared:
                continue  # of which the owners' gradients add up
            torch.testing.assert_close(found, truth, msg=say, **close)


def sources(of: Whole | Divided) -> list[Tensor]:
    return [of.hidden, *of.head.parameters()]


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and type(x) is Tensor and not x.is_meta:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "soft cap": lambda x: torch.tanh(x / 5.0) * 5.0,
    "scale": lambda x: x * 0.25,
    "divided": lambda x: x.float().div(3.0),
    "temperature": lambda x: x / torch.full((1,), 2.0),
    "bias": lambda x: x + torch.linspace(-1, 1, 131, dtype=x.dtype),
    "mask": lambda x: torch.where(torch.arange(131).view(1, 131) % 3 > 0, x, -5.0),
}


def every_option(rank: int, size: int, step: int) -> int:
    """Every reduction with every smoothing, weights and ignored tokens, on each kind of map; a soft cap before some.

    Args:
        rank: this rank's number.
        size: how many ranks there are.
        step: one in so many combinations is tried where classes are divided otherwise than unevenly, so that there are
            all values of each option if it has no factor in common with how many they are.

    Returns:
        How many combinations were tried.
    """
    group = TPGroup.of(dist.group.WORLD)
    linear_cross_entropy.PART_TOKENS, linear_cross_entropy.PART_LOGITS = 5, 1
    generator = torch.Generator().manual_seed(0)
    count = 0
    for place, (name, ownership) in enumerate(maps(size).items()):
        whole = Whole(ownership.size)
        divided = Divided(whole, ownership, group)
        weights = torch.rand(ownership.size, generator=generator, dtype=torch.double) + 0.1
        targets = {
            "some": whole.targets,
            "none": whole.targets.clamp(min=0),
            "all": torch.full_like(whole.targets, -100),
        }
        combinations = itertools.product(
            ("mean", "sum", "none"), (0.0, 0.3, 1.0), (None, weights), targets, ("nothing", "soft cap")
        )
        tried = [one for one in combinations if one[1] == 0.3 or one[-1] == "nothing"]
        for reduction, smoothing, weight, ignored, before in tried if name == "uneven" else tried[place % step :: step]:
            what = f"{name}, {reduction}, {smoothing}, weight {weight is not None}, ignored {ignored}, {before}"
            options: Any = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
            found = outcome(divided, targets[ignored], before, options)
            wanted = outcome(whole, targets[ignored], before, options)

            def say(text: str, what: str = what) -> str:
                return f"{what}: {text}"

            torch.testing.assert_close(found[0], wanted[0], rtol=1e-10, atol=1e-12, equal_nan=True, msg=say)
            divided.same(found[1], wanted[1], say, rtol=1e-9, atol=1e-11)
            assert ignored == "all" or all(x.abs().max() > 0 for x in wanted[1])
            count += 1
    return count


def outcome(of: Whole | Divided, targets: Tensor, before: str, options: Any) -> tuple[Tensor, list[Tensor]]:
    logits = BEFORE[before](of.head(of.hidden)).view(-1, of.head.out_features)
    loss = F.cross_entropy(logits, targets.view(-1), **options)
    upstream = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return loss.detach(), list(torch.autograd.grad(loss, sources(of), upstream))


@pytest.mark.parametrize(
    ("number", "step", "at_least"),
    [(2, 5, 140), *(pytest.param(number, 1, 400, marks=pytest.mark.nightly) for number in (2, 3))],
)
def test_every_option_equals_one_process(number: int, step: int, at_least: int) -> None:
    assert all(count > at_least for count in run_ranks(every_option, number, step))


# --- what code does with the logits on their way ---

SHIFTED: dict[str, Loss] = {
    "shifted": lambda x, t: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, x.size(-1)), t[..., 1:].reshape(-1)),
    "as transformers does": lambda x, t: F.cross_entropy(
        x.float().view(-1, x.size(-1)), F.pad(t, (0, 1), value=-100)[..., 1:].reshape(-1)
    ),
    "masked": lambda x, t: F.cross_entropy(x[t != -100], t[t != -100]),
    "classes in the middle": lambda x, t: F.cross_entropy(x.transpose(1, 2), t, reduction="none").sum(),
    "classes in the middle, biased": lambda x, t: F.cross_entropy(changed_bias(x).transpose(1, 2), t),
    "permuted": lambda x, t: F.cross_entropy(x.permute(0, 2, 1), t, label_smoothing=0.1),
    "one token": lambda x, t: F.cross_entropy(x[1, 3], t[1, 3]),
    "one row": lambda x, t: F.cross_entropy(x[1:].squeeze(0), t[1]),
    "unsqueezed": lambda x, t: F.cross_entropy(x.unsqueeze(1).flatten(0, 2), t.flatten()),
    "module": lambda x, t: nn.CrossEntropyLoss()(x.flatten(0, 1), t.flatten()),
    "log-probabilities": lambda x, t: token_log_probs(x[:, :-1], t[:, 1:]).exp().sum(),
    "narrow": lambda x, t: F.cross_entropy(x.bfloat16().float().flatten(0, 1), t.flatten()),
    "twice": lambda x, t: F.cross_entropy(x[0], t[0]) + F.cross_entropy(x[1], t[1], reduction="sum"),
    "no tokens": lambda x, t: F.cross_entropy(x[:, :0].reshape(-1, x.size(-1)), t[:, :0].reshape(-1), reduction="sum"),
    **{
        f"{name} before": lambda x, t, f=f: F.cross_entropy(f(x).flatten(0, 1), t.flatten())
        for name, f in BEFORE.items()
    },
}
LOOKED: dict[str, Loss] = {
    "argmax": lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten()) * (1 + (x.argmax(-1) == t).float().mean()),
    "KL": lambda x, t: (
        F.cross_entropy(x.flatten(0, 1), t.flatten())
        + F.kl_div(x.log_softmax(-1), torch.zeros_like(x).softmax(-1), reduction="sum")
    ),
    "z-loss": lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten()) + x.logsumexp(-1).square().mean(),
    "looked at first": lambda x, t: x.softmax(-1).square().sum() + F.cross_entropy(x.flatten(0, 1), t.flatten()),
    "looked at without gradients": lambda x, t: (
        looked_at(x) * F.cross_entropy(x.flatten(0, 1), t.flatten()) + x.sin().sum()
    ),
    "a temperature of each position": lambda x, t: F.cross_entropy(
        (x / torch.linspace(1, 2, LENGTH).view(-1, 1)).flatten(0, 1), t.flatten()
    ),
    "probabilities": lambda x, t: F.cross_entropy(x.flatten(0, 1), torch.zeros_like(x).softmax(-1).flatten(0, 1)),
    "below Python": lambda x, t: Squared.apply(x) + F.cross_entropy(x.flatten(0, 1), t.flatten()),
    "copy": lambda x, t: F.cross_entropy(x.clone().flatten(0, 1), t.flatten()),
}


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def changed_bias(x: Tensor) -> Tensor:
    """With a bias that changes afterwards, which has no effect."""
    bias = torch.linspace(-1, 1, 131, dtype=x.dtype)
    biased = x + bias
    bias.zero_()
    return biased


@torch.no_grad()
def looked_at(x: Tensor) -> Tensor:
    return x.amax().float().clone()


def tolerance(way: str) -> dict[str, float]:
    """How near a loss and its gradients are to one process's: some ways compute in lower precision."""
    if way == "narrow":
        return {"rtol": 1e-2, "atol": 1e-2}
    low = way in ("as transformers does", "divided before")
    return {"rtol": 1e-4, "atol": 1e-5} if low else {"rtol": 1e-9, "atol": 1e-10}


def every_way(rank: int, size: int) -> dict[str, int]:
    group = TPGroup.of(dist.group.WORLD)
    linear_cross_entropy.PART_TOKENS, linear_cross_entropy.PART_LOGITS = 3, 1
    ownership = Ownership.even(131, size)
    whole = Whole(131)
    divided = Divided(whole, ownership, group)
    largest: dict[str, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, loss in (SHIFTED | LOOKED).items():
            with Largest() as seen:
                value = loss(divided.head(divided.hidden), divided.targets)
                gradients = list(torch.autograd.grad(value, sources(divided)))
            largest[name] = seen.elements
            wanted = loss(whole.head(whole.hidden), whole.targets)
            close = tolerance(name)

            def say(text: str, name: str = name) -> str:
                return f"{name}: {text}"

            torch.testing.assert_close(value, wanted, msg=say, **close)
            divided.same(gradients, list(torch.autograd.grad(wanted, sources(whole))), say, **close)
    return largest


def test_every_way_to_the_loss_equals_one_process() -> None:
    # The head has 131 x 4 parameters, all logits are 18 x 131.
    own = BATCH * LENGTH * (131 // 2)
    for largest in run_ranks(every_way, 2):
        for name in SHIFTED:
            assert largest[name] < own / 2, f"{name}: {largest[name]}"
        for name in LOOKED:
            assert largest[name] >= own, f"{name}: {largest[name]}"


# --- precision, second derivatives, evaluation ---


def other_ways(rank: int, size: int) -> dict[str, Any]:
    group = TPGroup.of(dist.group.WORLD)
    linear_cross_entropy.PART_TOKENS, linear_cross_entropy.PART_LOGITS = 5, 1
    ownership = Ownership.even(131, size)
    second_derivatives(group, ownership)
    precisions(group, ownership)
    evaluation(group, ownership)
    again_and_in_checkpoints(group, ownership)
    frozen(group, ownership)
    return {"errors": errors(group, ownership)}


def second_derivatives(group: TPGroup, ownership: Ownership) -> None:
    whole = Whole(131)
    divided = Divided(whole, ownership, group)
    for name in ("as transformers does", "soft cap before", "classes in the middle, biased", "log-probabilities"):
        results = []
        for of in (divided, whole):
            loss = SHIFTED[name](of.head(of.hidden), of.targets)
            (first,) = torch.autograd.grad(loss, of.hidden, create_graph=True)
            results.append([first.detach(), *torch.autograd.grad(first.pow(3).sum(), sources(of))])
        close = {"rtol": 1e-3, "atol": 1e-6} if "transformers" in name else {"rtol": 1e-8, "atol": 1e-11}
        found, wanted = results
        torch.testing.assert_close(found[0], wanted[0], **close)
        divided.same(found[1:], wanted[1:], name, **close)


def precisions(group: TPGroup, ownership: Ownership) -> None:
    """Low-precision parameters, autocast over fp32 ones, and a loss that is scaled."""
    loss = SHIFTED["as transformers does"]
    for dtype in (torch.bfloat16, torch.float16):
        exact = Whole(131)
        truth = torch.autograd.grad(loss(exact.head(exact.hidden), exact.targets), sources(exact))
        for autocast, scale in itertools.product((False, True), (1.0, 1024.0)):
            whole = Whole(131, torch.float32 if autocast else dtype)
            for mine, original in zip(whole.parameters(), exact.parameters(), strict=True):
                mine.data.copy_(original)
            divided = Divided(whole, ownership, group)
            errors = []
            for of in (divided, whole):
                with torch.autocast("cpu", dtype, enabled=autocast):
                    logits = of.head(of.hidden)
                    assert logits.dtype == dtype
                    value = loss(logits, of.targets)
                assert value.dtype == torch.float32
                gradients = torch.autograd.grad(value * scale, sources(of))
                assert all(x.dtype == source.dtype for x, source in zip(gradients, sources(of), strict=True))
                rows = Shard(((0, ownership),))
                wanted = [truth[0], *(part(x, rows, group.rank) for x in truth[1:])]
                if of is whole:
                    gradients = (gradients[0], *(part(x, rows, group.rank) for x in gradients[1:]))
                errors.append([float((x / scale - y).abs().max()) for x, y in zip(gradients, wanted, strict=True)])
            for mine, one_process, exactly in zip(*errors, wanted, strict=True):
                bound = 2 * one_process + 4 * torch.finfo(dtype).eps * float(exactly.abs().max())
                assert mine <= bound, (dtype, autocast, scale, errors)


def evaluation(group: TPGroup, ownership: Ownership) -> None:
    whole = Whole(131)
    divided = Divided(whole, ownership, group)
    wanted = SHIFTED["shifted"](whole.head(whole.hidden), whole.targets)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            logits = divided.head(divided.hidden)
            with Largest() as seen:
                found = SHIFTED["shifted"](logits, divided.targets)
        assert seen.elements < BATCH * LENGTH * 65 / 2
        assert not found.requires_grad
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=0)
        # Looked at later, and of hidden states that have changed since.
        divided.hidden.data.add_(1)
        torch.testing.assert_close(logits.full(), whole.head(whole.hidden).detach(), rtol=1e-10, atol=1e-12)
        assert not logits.full().requires_grad
        divided.hidden.data.sub_(1)
    assert isinstance(logits, VocabParallelLogits)


def again_and_in_checkpoints(group: TPGroup, ownership: Ownership) -> None:
    whole = Whole(131)
    divided = Divided(whole, ownership, group)
    loss = SHIFTED["soft cap before"]
    value = loss(divided.head(divided.hidden), divided.targets)
    first = torch.autograd.grad(value, sources(divided), retain_graph=True)
    second = torch.autograd.grad(value, sources(divided))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    around_head = loss(checkpoint(divided.head, divided.hidden, use_reentrant=False), divided.targets)
    around_both = checkpoint(lambda x: loss(divided.head(x), divided.targets), divided.hidden, use_reentrant=False)
    for each in (around_head, around_both):
        torch.testing.assert_close(torch.autograd.grad(each, sources(divided)), first)


def frozen(group: TPGroup, ownership: Ownership) -> None:
    """Only what needs a gradient gets one."""
    whole = Whole(131)
    wanted = torch.autograd.grad(SHIFTED["shifted"](whole.head(whole.hidden), whole.targets), sources(whole))
    for trained in range(3):
        divided = Divided(whole, ownership, group)
        for place, source in enumerate(sources(divided)):
            source.requires_grad_(place == trained)
        SHIFTED["shifted"](divided.head(divided.hidden), divided.targets).backward()
        for place, source in enumerate(sources(divided)):
            assert (source.grad is not None) == (place == trained)
        gradient = sources(divided)[trained].grad
        assert gradient is not None
        truth = wanted[trained] if trained == 0 else part(wanted[trained], Shard(((0, ownership),)), group.rank)
        torch.testing.assert_close(gradient, truth, rtol=1e-9, atol=1e-12)


def errors(group: TPGroup, ownership: Ownership) -> dict[str, str]:
    said = {}

    def refused(name: str, function: Callable[[], Any]) -> None:
        with pytest.raises((RuntimeError, IndexError)) as found:
            function()
        said[name] = str(found.value)

    divided = Divided(Whole(131), ownership, group)
    logits = divided.head(divided.hidden)
    kept = divided.head(divided.hidden)
    values = kept.detach().full()
    with torch.no_grad():
        divided.head.weight.mul_(2)
    refused("the weight changed", logits.argmax)
    refused("the weight changed before the loss", lambda: SHIFTED["shifted"](logits, divided.targets))
    uncounted, its_view = divided.head(divided.hidden), divided.head(divided.hidden)[:, 1:]
    divided.head.weight.data.mul_(2)
    note_written([divided.hidden.clone()])
    assert its_view.shape == its_view.full().shape
    its_view = uncounted[:, 1:]
    note_written([divided.head.weight.data])
    refused("a write that is not counted", its_view.full)
    before = divided.head(divided.hidden)
    expected = before.detach().full()
    compute_undone()
    with torch.no_grad():
        divided.head.weight.mul_(2)
    assert torch.equal(before.full(), expected)
    assert not torch.equal(values, expected)
    other = divided.head(divided.hidden)
    divided.head.weight.data = divided.head.weight.data.clone()
    refused("another memory", lambda: other.full())
    hooked = divided.head(divided.hidden)
    shifted = hooked[:, :-1]
    hooked.register_hook(lambda gradient: None)
    refused("a view from before the hook", lambda: shifted.full())
    used = divided.head(divided.hidden)
    SHIFTED["shifted"](used, divided.targets)
    refused("a hook after the loss", lambda: used.register_hook(lambda gradient: None))
    refused("no class", lambda: F.cross_entropy(used.flatten(0, 1), divided.targets.flatten() + 100))
    refused("a view that does not fit", lambda: used[:, :-1].view(-1, 131))
    refused("in place", lambda: used.mul_(2))
    return said


def test_precision_second_derivatives_and_errors() -> None:
    for seen in run_ranks(other_ways, 2):
        said = seen["errors"]
        assert "the weight that they are made of changed" in said["the weight changed"]
        assert said["the weight changed before the loss"] == said["the weight changed"]
        assert said["a write that is not counted"] == said["the weight changed"]
        assert "the weight that they are made of changed" in said["another memory"]
        assert "add the hook first" in said["a view from before the hook"]
        assert "add the hook before the loss is computed" in said["a hook after the loss"]
        assert "targets must be classes of the whole vocabulary, in [0, 131)" in said["no class"]
        assert "view size is not compatible" in said["a view that does not fit"]
        assert "in place" in said["in place"]


# --- training ---


class Returns(L.LightningModule):
    """Computes its own loss, returns the logits with it, and looks at them after the optimizer's step.

    Args:
        automatic: whether Lightning makes the steps.
        passes: of a step.
    """

    def __init__(self, automatic: bool, passes: int) -> None:
        super().__init__()
        self.automatic_optimization, self.passes = automatic, passes
        self.losses: list[Tensor] = []
        self.seen: list[Tensor] = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = tiny_model("llama")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self.model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.losses.append(loss.detach())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.manual_backward(loss / self.passes)
            if (batch_idx + 1) % self.passes == 0:
                optimizer.step()
                optimizer.zero_grad()
        return {"loss": loss, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["logits"].detach().exp().mean(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(devices: int, copies: int = 1) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Two batches a step, one after the other, or each in a copy of the model."""
    results = []
    for automatic in (True, False):
        L.seed_everything(1, verbose=False)
        task = Returns(automatic, 2 // copies)
        strategy = AutoTPStrategy(
            data_parallel_size=copies,
            activation_checkpointing=None if copies == 1 else "blocks" if automatic else "offload",
        )
        trainer = L.Trainer(
            accelerator="cpu", devices=devices,
            strategy=strategy if devices > 1 else "auto", max_epochs=1,
            accumulate_grad_batches=task.passes if automatic else 1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        batches: Any = [token_batch(seed) for seed in range(4)]
        rank = dist.get_rank() * copies // devices if copies > 1 else 0
        sampler = DistributedSampler(batches, copies, rank, shuffle=False)
        trainer.fit(task, DataLoader(batches, batch_size=None, sampler=sampler))
        results.append((task.losses, task.seen))
    return results


@pytest.mark.parametrize("copies", [1, 2])
def test_logits_that_a_step_returns_are_those_before_the_step(copies: int) -> None:
    wanted = train(1)
    for rank, found in enumerate(run_trainer_ranks(train, 2 * copies, 2 * copies, copies)):
        for (losses, seen), (wanted_losses, wanted_seen) in zip(found, wanted, strict=True):
            mine = slice(rank // 2, None, copies)
            assert wanted_losses[0] != wanted_losses[-1]
            torch.testing.assert_close(losses, wanted_losses[mine], rtol=1e-5, atol=0)
            torch.testing.assert_close(seen, wanted_seen[mine], rtol=1e-4, atol=1e-5)


# --- models ---

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 30.0},
    "granite": {"logits_scaling": 2.0},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
    "gpt_neox": {},
}


def of_one_layer(family: str) -> Any:
    return tiny_model(family, vocab_size=2003, num_hidden_layers=1, **FAMILIES[family])


def all_labels(copies: int) -> dict[str, Tensor]:
    """Each copy's part has as many labels, and larger logits than the parameters that FSDP2 gathers."""
    ids = token_batch(0, batch=8 if copies == 1 else 24 * copies, length=64, vocabulary=2003)["input_ids"]
    return {"input_ids": ids, "labels": ids}


def models(rank: int, size: int, families: list[str], copies: int) -> dict[str, Any]:
    linear_cross_entropy.PART_TOKENS, linear_cross_entropy.PART_LOGITS = 64, 1
    mesh = init_device_mesh("cpu", (copies, size // copies), mesh_dim_names=("data", "tensor"))
    seen = {}
    for family in families:
        model = of_one_layer(family)
        parallelize(model, mesh["tensor"].get_group(), data_mesh=mesh["data"] if copies > 1 else None)
        batch = {name: x.chunk(copies)[rank * copies // size] for name, x in all_labels(copies).items()}
        with Largest() as largest:
            loss = model(**batch).loss
            loss.backward()
        seen[family] = {
            "loss": loss.detach(),
            "gradients": full_gradients(model),
            "largest": largest.elements,
            "logits": model(**batch).logits.detach().full(),
            "said": model.autotp.plan.losses_in_parts,
        }
    return seen


@pytest.mark.parametrize(
    ("copies", "families"),
    [
        (1, ["gemma2", "granite"]),
        (2, ["cohere"]),
        pytest.param(1, ["cohere", "llama", "gpt_neox"], marks=pytest.mark.nightly),
        pytest.param(2, ["gemma2", "granite", "llama", "gpt_neox"], marks=pytest.mark.nightly),
    ],
)
def test_models_compute_no_logits_for_their_loss(copies: int, families: list[str]) -> None:
    results = run_ranks(models, 2 * copies, families, copies)
    for family in families:
        model = of_one_layer(family)
        output = model(**all_labels(copies))
        output.loss.backward()
        losses = torch.stack([result[family]["loss"] for result in results])
        torch.testing.assert_close(losses.mean(), output.loss.detach(), rtol=1e-6, atol=0)
        for rank, seen in enumerate(result[family] for result in results):
            logits = output.logits.detach().chunk(copies)[rank // 2]
            torch.testing.assert_close(seen["logits"], logits, rtol=1e-4, atol=1e-5)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                scale = float(parameter.grad.abs().max())
                torch.testing.assert_close(
                    seen["gradients"][name],
                    parameter.grad,
                    rtol=1e-4,
                    atol=1e-4 * scale,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
            assert seen["largest"] < output.logits[..., :1001].numel() / copies / 2, family
            assert seen["said"], family


# --- with copies ---


def ways_with_copies(rank: int, size: int) -> int:
    """Every way and option with copies, of which FSDP2 gathers the head: each copy's loss, the mean of the gradients.

    Returns:
        How many were tried.
    """
    linear_cross_entropy.PART_TOKENS, linear_cross_entropy.PART_LOGITS = 5, 1
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    whole = tiny_model("llama", num_hidden_layers=1).double()
    model = copy.deepcopy(whole)
    parallelize(model, mesh["tensor"].get_group(), data_mesh=mesh["data"])
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(131, generator=generator, dtype=torch.double) + 0.1
    ids = torch.randint(0, 131, (2, BATCH, LENGTH), generator=generator)  # of both copies
    targets = ids.clone()
    targets[0, 0, 2:5] = targets[1, 1, 6:] = -100
    cases: dict[str, Loss] = {**SHIFTED, **LOOKED}
    for reduction, smoothing, weight in itertools.product(("mean", "sum", "none"), (0.0, 0.3), (None, weights)):
        options = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
        cases[f"{reduction}, {smoothing}, weight {weight is not None}"] = partial(upstreamed, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, loss in cases.items():
            close = tolerance(name)
            for one in (whole, model):
                one.zero_grad()
            wanted = [loss(whole(input_ids=x, use_cache=False).logits, y) for x, y in zip(ids, targets, strict=True)]
            torch.stack(wanted).mean().backward()
            mine = mesh["data"].get_local_rank()
            found = loss(model(input_ids=ids[mine], use_cache=False).logits, targets[mine])
            found.backward()
            torch.testing.assert_close(found, wanted[mine], **close, msg=lambda text, name=name: f"{name}: {text}")
            gradients = full_gradients(model)
            for path, parameter in whole.named_parameters():
                torch.testing.assert_close(
                    gradients[path], parameter.grad, **close, msg=lambda text, of=(name, path): f"{of}: {text}"
                )
    return len(cases)


def upstreamed(options: dict[str, Any], logits: Tensor, targets: Tensor) -> Tensor:
    """The loss with these options, or of each token another multiple."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)
    return (loss * torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum()


@pytest.mark.nightly  # daily, a model's own loss with copies
def test_every_way_and_option_with_copies() -> None:
    assert run_ranks(ways_with_copies, 4) == 4 * [len(SHIFTED | LOOKED) + 12]
