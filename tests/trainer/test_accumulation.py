"""Gradients between the batches of an accumulation, under the real Trainer and under Fabric, against one process.

The models have norms over heads, and norms under sequence parallelism: parameters that every rank has whole, and whose
gradients are summed over the ranks once for an optimizer's step, or when somebody reads one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from selected import nightly, selected
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from training import SameStart, trainer

from lightning_autotp import AutoTPFabricStrategy, AutoTPStrategy, full_gradients, full_state_dict
from lightning_autotp.layouts.types import Replicate
from lightning_autotp.parameters.state import parallel_models

BATCHES = 7
TOGETHER = 3
"""Batches of a step. The last one of an epoch takes the one that is left."""
MIXING = torch.randn(131, 64, generator=torch.Generator().manual_seed(5))
"""Makes a model's probabilities another one's embeddings."""
DATA = [token_batch(seed, 1, 16) for seed in range(BATCHES)]


def build(kind: str) -> Any:
    model: Any = tiny_model("qwen3", num_hidden_layers=1)
    if "checkpointed" in kind:
        reentrant = kind == "checkpointed, reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def compile_blocks(model: Any) -> None:
    torch._dynamo.reset()
    for block in model.model.layers:
        block.compile(backend="aot_eager")


class Seen:
    """What a run writes down, on one process and on a rank of several in the same way."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[dict[str, float]] = []
        self.gradients: list[dict[str, Tensor]] = []

    def look(self, model: nn.Module) -> None:
        """Read the norms as any code does, of one gradient after the other or of all together."""
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if len(self.norms) % 2:
            norms = [gradient.norm() for gradient in gradients.values()]
        else:
            norms = list(torch._foreach_norm(list(gradients.values())))
        self.norms.append(dict(zip(gradients, map(float, norms), strict=True)))

    def take(self, model: nn.Module) -> None:
        """Take the whole gradients, without a norm that was read before."""
        named = model.named_parameters(remove_duplicate=False)
        is_parallel = hasattr(model, "autotp")
        self.gradients.append(
            full_gradients(model) if is_parallel else {name: p.grad.clone() for name, p in named if p.grad is not None}
        )

    def end(self, model: nn.Module) -> dict[str, Any]:
        named = full_state_dict(model) if hasattr(model, "autotp") else model.state_dict()
        weights = {name: value.clone() for name, value in named.items()}
        summed = sum(
            isinstance(meta.layout, Replicate) for _, state in parallel_models(model) for meta in state.metas.values()
        )
        return {**vars(self), "weights": weights, "summed": summed}


class Reads(L.Callback):
    """Logs norms after every backward pass, also those of an accumulation."""

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.found.look(pl_module.model)
        pl_module.log("norm", pl_module.found.norms[-1]["model.norm.weight"])


class Accumulates(SameStart):
    """A task of one kind after another; see :data:`KINDS`."""

    kind: str

    def begin(self, kind: str) -> None:
        """Be of a kind, with the weights of the first one and nothing seen."""
        self.kind = kind
        self.found = Seen()
        self.automatic_optimization = kind != "manual"
        self.restore()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = build(self.kind)
            if self.kind == "compiled":
                compile_blocks(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        batch = {name: value[0] for name, value in batch.items()}
        loss: Tensor = self.model(**batch, use_cache=False).loss
        self.found.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss / TOGETHER, retain_graph=True)
        self.manual_backward(loss / TOGETHER)
        if (batch_idx + 1) % TOGETHER == 0 or batch_idx + 1 == BATCHES:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_after_backward(self) -> None:
        if self.kind == "changed" and self.model.model.norm.weight.grad is not None:
            self.model.model.norm.weight.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.found.look(self.model)
        self.found.take(self.model)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self.kind != "zeroed")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


KINDS = (
    "read", "unread", "changed", "manual", "zeroed", "stepped", "compiled", "checkpointed", "checkpointed, reentrant",
)  # fmt: skip
"""Norms are read after every pass, but in "unread"; gradients are changed there; the loop is written by hand, with two
passes a batch; zero_grad leaves zeros; the optimizer is the first to read."""
BUILT_OTHERWISE = ("compiled", "checkpointed", "checkpointed, reentrant")
CHANGING = ("read", "unread", "changed", "manual", "stepped")
"""Those that have numbers of their own in one process."""


def fit(kind: str, strategy: Any = "auto", devices: int = 1, task: Accumulates | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {"max_epochs": 1, "max_steps": -1}
    if kind != "manual":
        options |= {"accumulate_grad_batches": TOGETHER, "gradient_clip_val": 0.5}
    task = Accumulates() if task is None else task
    task.begin(kind)
    callbacks = [] if kind == "unread" else [Reads()]
    trainer(strategy, devices, **options, callbacks=callbacks).fit(task, DataLoader(DATA))  # type: ignore[arg-type]
    return task.found.end(task.model)


def loop(kind: str, strategy: Any = "auto", devices: int = 1) -> dict[str, Any]:
    """The same by hand, under Fabric."""
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=devices)
    fabric.launch()
    with fabric.init_module():
        made = build(kind)
    if kind == "compiled":
        compile_blocks(made)
    model, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.3, momentum=0.9, foreach=True))
    found = Seen()
    for number, batch in enumerate(DATA):
        is_last = (number + 1) % TOGETHER == 0 or number + 1 == BATCHES
        with fabric.no_backward_sync(model, enabled=kind == "stepped" or not is_last):
            loss = model(**batch, use_cache=False).loss
            fabric.backward(loss / TOGETHER)
        found.losses.append(loss.item())
        if kind == "changed":
            made.model.norm.weight.grad.mul_(0.5)
        if kind not in ("unread", "stepped"):
            found.look(made)
        if is_last:
            if kind != "stepped":
                found.take(made)
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                found.norms.append({"clipped": float(norm)})
            optimizer.step()
            optimizer.zero_grad()
    return found.end(made)


PAIRS = (
    "in turns",
    "loss over both",
    "one into the other",
    "sums of one postponed",
    "steps of their own",
    "read",
    "never summed",
)
"""Two models with an optimizer each: both are called with every batch, one after the other; their losses are added up;
the second one takes what the first one gives; a ``no_backward_sync`` of the first is around the passes of both; the
second one makes a step with every batch; gradients are read and changed in between; no pass is outside."""


def pair(way: str, strategy: Any = "auto", devices: int = 1) -> dict[str, Any]:
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=devices)
    fabric.launch()
    fabric.seed_everything(2, verbose=False)
    first, second = made = [build(way), build(way)]
    (a, ours), (b, others) = [fabric.setup(m, torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9)) for m in made]
    found = [Seen(), Seen()]

    def step(model: Any, optimizer: Any, seen: Seen, is_zeroed: bool) -> None:
        seen.take(model.module)
        seen.norms.append({"clipped": float(fabric.clip_gradients(model, optimizer, max_norm=0.5))})
        optimizer.step()
        optimizer.zero_grad(set_to_none=not is_zeroed)

    for number, batch in enumerate(DATA[:6]):
        is_last = number % TOGETHER == TOGETHER - 1
        waits = not is_last or way == "never summed"
        with ExitStack() as postponed:
            postponed.enter_context(fabric.no_backward_sync(a, enabled=waits))
            if way not in ("sums of one postponed", "steps of their own"):
                postponed.enter_context(fabric.no_backward_sync(b, enabled=waits))
            if way == "one into the other":
                mixed = a(input_ids=batch["input_ids"], use_cache=False).logits.softmax(-1) @ MIXING
                losses = [b(inputs_embeds=mixed, labels=batch["labels"], use_cache=False).loss]
                fabric.backward(losses[0] / TOGETHER)
            elif way == "loss over both":
                losses = [model(**batch, use_cache=False).loss for model in (a, b)]
                fabric.backward(sum(losses) / TOGETHER)
            else:
                losses = []
                for model in (a, b):
                    losses.append(model(**batch, use_cache=False).loss)
                    fabric.backward(losses[-1] / TOGETHER)
        found[0].losses += [loss.item() for loss in losses]
        if way == "read":
            found[1].look(second)
            if number == 1:
                first.model.norm.weight.grad.mul_(0.5)
        if is_last:
            step(a, ours, found[0], way == "read")
        if is_last or way == "steps of their own":
            step(b, others, found[1], way == "read")
    ends = [seen.end(model) for seen, model in zip(found, made, strict=True)]
    return {
        "losses": ends[0]["losses"],
        "norms": ends[0]["norms"] + ends[1]["norms"],
        "gradients": ends[0]["gradients"] + ends[1]["gradients"],
        "weights": {f"{number}.{name}": x for number, end in enumerate(ends) for name, x in end["weights"].items()},
        "summed": ends[0]["summed"],
    }


Run = Callable[..., dict[str, Any]]
CASES: dict[str, tuple[Run, str]] = {
    **{f"Trainer, {kind}": (fit, kind) for kind in KINDS if kind != "stepped"},
    **{f"Fabric, {kind}": (loop, kind) for kind in KINDS if kind not in ("manual", "zeroed", "checkpointed")},
    **{f"Fabric, two models, {way}": (pair, way) for way in PAIRS},
}


WITHOUT_TOKENS = ("Trainer, read",)
"""Of the others only runs with sequence parallelism, which sum the gradients of more parameters, are for every day."""
REPEATS = {
    "Trainer, compiled", "Trainer, unread", "Trainer, checkpointed", "Trainer, checkpointed, reentrant",
    "Fabric, read", "Fabric, changed", "Fabric, compiled", "Fabric, two models, in turns",
    "Fabric, two models, steps of their own", "Fabric, two models, sums of one postponed",
    "Fabric, two models, never summed",
}  # fmt: skip
"""What another of the Trainer and Fabric does, or other pairs."""
ALL = [(case, tokens) for case in CASES for tokens in (True, False)]
NIGHTLY = [(case, tokens) for case, tokens in ALL if case in REPEATS or not (tokens or case in WITHOUT_TOKENS)]
Found = list[dict[tuple[str, bool], dict[str, Any]]]


def two_ranks(runs: list[tuple[str, bool]]) -> dict[tuple[str, bool], dict[str, Any]]:
    found: dict[tuple[str, bool], dict[str, Any]] = {}
    tasks: dict[tuple[str, bool], Accumulates] = defaultdict(Accumulates)  # by what their models are
    for case, tokens in runs:
        run, kind = CASES[case]
        if run is fit:
            task = tasks[kind if kind in BUILT_OTHERWISE else "", tokens]
            found[case, tokens] = fit(kind, AutoTPStrategy(2, 1, sequence_parallel=tokens), 2, task)
        else:
            found[case, tokens] = run(kind, AutoTPFabricStrategy(2, 1, sequence_parallel=tokens), 2)
    return found


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> Found:
    return run_trainer_ranks(two_ranks, 2, selected(request, "run"))


@lru_cache
def alone(run: Run, kind: str) -> dict[str, Any]:
    return run(kind)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        worst = (found[name] - value).abs().max() / value.abs().max()
        assert worst < 1e-4, f"{name} differs by {worst:.1e}"


@pytest.mark.parametrize("run", nightly(ALL, NIGHTLY))
def test_gradients_are_one_process_s_whenever_they_are_read(run: tuple[str, bool], two: Found) -> None:
    case, tokens = run
    fitted, kind = CASES[case]
    wanted = alone(fitted, kind if kind in (*CHANGING, *PAIRS) else "read")
    for found in (seen[case, tokens] for seen in two):
        assert found["summed"] > 0
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert len(found["norms"]) == len(wanted["norms"])
        for mine, theirs in zip(found["norms"], wanted["norms"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
        assert len(found["gradients"]) == len(wanted["gradients"])
        for mine, theirs in zip(found["gradients"], wanted["gradients"], strict=True):
            same(mine, theirs)
        same(found["weights"], wanted["weights"])


def test_more_gradients_are_summed_under_sequence_parallelism(two: Found) -> None:
    for case in WITHOUT_TOKENS:
        assert two[0][case, True]["summed"] > two[0][case, False]["summed"]


def test_kinds_are_what_they_say() -> None:
    assert {kind: len(alone(loop, kind)["gradients"]) for kind in ("read", "stepped")} == {"read": 3, "stepped": 0}
    assert {way: len(alone(pair, way)["gradients"]) for way in ("read", "steps of their own")} == {
        "read": 4, "steps of their own": 8,
    }  # fmt: skip
    for run in (fit, loop):
        read, unread, changed = (alone(run, kind) for kind in ("read", "unread", "changed"))
        assert len(read["losses"]) == BATCHES
        assert len(read["norms"]) == len(unread["norms"]) + BATCHES
        name = "model.norm.weight"
        assert not torch.allclose(changed["gradients"][0][name], read["gradients"][0][name])
    assert min(norms["clipped"] for norms in alone(loop, "unread")["norms"]) > 0.5
