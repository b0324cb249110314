"""What a training loop does with gradients and optimizers, through the real Trainer, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import grad_norm
from norms import assert_same_norms
from selected import nightly, selected
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from training import Task, assert_parity, error_of, loader, trainer

from lightning_autotp import AutoTPStrategy, full_state_dict, grad_norms
from lightning_autotp.parameters.state import parallel_models

IDS = torch.randint(0, 67, (32, 9), generator=torch.Generator().manual_seed(2))
VARIANTS = (
    "groups",
    "two optimizers",
    "by torch",
    "frozen",
    "thawed",
    "unused",
    "accumulated",
    "clipped",
    "clipped values",
)
REPEATS = ("clipped", "clipped values")
"""For nightly tests: a transformer is clipped in both ways on three ranks."""


class Branching(nn.Module):
    """Two residual branches, of which the second one can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(67, 16)
        self.norm = nn.LayerNorm(16)
        self.first = nn.Sequential(nn.Linear(16, 40), nn.SiLU(), nn.Linear(40, 16))
        self.second = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16))
        self.classes = nn.Linear(16, 67, bias=False)

    def forward(self, ids: Tensor, both: bool = True) -> Tensor:
        x = self.table(ids)
        x = x + self.first(self.norm(x))
        if both:
            x = x + self.second(x)
        return F.cross_entropy(self.classes(x).flatten(0, 1), ids.roll(-1, 1).flatten())


class Loop(L.LightningModule):
    """Trains in the way its variant says, and writes down losses and the norms of gradients."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.automatic_optimization = variant not in ("two optimizers", "by torch")
        self.model = Branching()
        self.seen: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
        if variant == "frozen":
            self.model.table.requires_grad_(False)
            self.model.first[0].weight.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        both = self.variant != "unused" or batch_idx % 2 == 0
        if self.automatic_optimization:
            loss: Tensor = self.model(batch, both=both)
            self.seen["losses"].append(loss.item())
            return loss
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizers, list)
        assert isinstance(schedulers, list)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            self.toggle_optimizer(optimizer)
            loss = self.model(batch)
            self.seen["losses"].append(loss.item())
            self.manual_backward(loss)
            self._clip(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            scheduler.step()  # type: ignore[call-arg]
        return None

    def _clip(self, optimizer: Any) -> None:
        if self.variant == "two optimizers":
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            return
        # As in a loop without Lightning, with a frozen row and some noise.
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.model.table.weight.grad is not None:
            self.model.table.weight.grad[:5] = 0
        torch.manual_seed(self.global_step)  # what is drawn before the first step is another number of numbers
        for parameter in parameters:
            parameter.grad += 0.01 * torch.randn_like(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.2)
        largest = torch.stack([parameter.grad.abs().max() for parameter in parameters]).max()
        self.seen["losses"] += [norm.item(), largest.item()]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        parallel = any(hasattr(module, "autotp") for module in self.modules())
        norms = grad_norms(self) if parallel else grad_norm(self, 2)
        self.log_dict(norms)
        self.seen["norms"].append({name: float(norm) for name, norm in norms.items()})
        self.seen["rates"].append([group["lr"] for group in optimizer.param_groups])
        if self.global_step == 1:
            largest = grad_norms(self, "inf", ".") if parallel else grad_norm(self, "inf", ".")
            self.seen["largest"] = {name: float(norm) for name, norm in largest.items()}

    def configure_optimizers(self) -> Any:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        matrices, rest = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim < 2]
        if self.variant in ("two optimizers", "by torch"):
            both = torch.optim.AdamW(matrices, lr=0.01), torch.optim.SGD(rest, lr=0.5, momentum=0.9)
            return list(both), [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in both]
        if self.variant == "groups":
            last = [p for name, p in named if "classes" in name]
            others = [p for p in matrices if not any(p is other for other in last)]
            groups = [
                {"params": others, "weight_decay": 0.1},
                {"params": rest, "weight_decay": 0.0},
                {"params": last, "lr": 0.1},
            ]
            optimizer = torch.optim.AdamW(groups, lr=0.02)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.02, 0.1], total_steps=8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        return torch.optim.SGD([p for _, p in named], lr=0.5, momentum=0.9)


class Thaw(BaseFinetuning):
    """The first branch, and the embedding with it, from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.model.first, pl_module.model.table])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.model.first, pl_module.model.table], optimizer, lr=0.3)


OPTIONS: dict[str, dict[str, Any]] = {
    "thawed": {"max_epochs": 2, "limit_train_batches": 4, "max_steps": -1},
    "accumulated": {"accumulate_grad_batches": 3, "max_steps": 4},
    "clipped": {"gradient_clip_val": 0.3},
    "clipped values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


def run(strategy: Any, devices: int, variant: str) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    task = Loop(variant)
    options = {"max_steps": 16 if variant in ("two optimizers", "by torch") else 8, **OPTIONS.get(variant, {})}
    if variant == "thawed":
        options["callbacks"] = [Thaw()]
    fitting = trainer(strategy, devices, **options)
    fitting.fit(task, DataLoader(IDS, batch_size=4))  # type: ignore[arg-type]
    task.seen["logged"] = sorted(name for name in fitting.callback_metrics if name.startswith("grad"))
    return finished(task, devices)


def finished(task: Any, devices: int) -> dict[str, Any]:
    weights = full_state_dict(task) if devices > 1 else {name: v.clone() for name, v in task.state_dict().items()}
    return {**task.seen, "weights": weights}


class LogsNorms(Task):
    """A transformer that writes down the norms of its gradients."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        parallel = any(hasattr(module, "autotp") for module in self.modules())
        norms = grad_norms(self) if parallel else grad_norm(self, 2)
        self.seen.setdefault("norms", []).append({name: float(norm) for name, norm in norms.items()})


CLIPPING = {
    "norm": {"gradient_clip_val": 0.3},
    "value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
}


def transformer(strategy: Callable[[], Any], devices: int) -> dict[str, dict[str, Any]]:
    """Clipped in each way, one after the other."""
    L.seed_everything(3, verbose=False)
    task, found = LogsNorms("init", 0.5, "SGD"), {}
    for clipping, options in CLIPPING.items():
        task.begin()
        trainer(strategy(), devices, max_steps=4, **options).fit(task, loader())
        found[clipping] = finished(task, devices)
        metas = {meta.name: meta for _, state in parallel_models(task) for meta in state.metas.values()}.values()
        found[clipping]["shared"] = sum(len(block.ranks) < meta.ranks for meta in metas for block in meta.grad_sync)
    return found


class WholeTensors(Loop):
    """With optimizers that look at whole tensors."""

    def configure_optimizers(self) -> Any:
        if self.variant == "Muon":
            return torch.optim.Muon([p for p in self.parameters() if p.ndim > 1])
        return torch.optim.Adafactor(self.parameters())


def two_ranks(variants: list[str]) -> dict[str, Any]:
    strategy = lambda: AutoTPStrategy(2, 1, example_inputs=example)  # noqa: E731
    seen: dict[str, Any] = {variant: run(strategy(), 2, variant) for variant in variants}
    for variant in ("Muon", "Adafactor"):
        seen[variant] = error_of(trainer(strategy(), 2, max_steps=1).fit, WholeTensors(variant), DataLoader(IDS))  # type: ignore[arg-type]
    return seen


def example() -> dict[str, Any]:
    return {"ids": torch.zeros(3, 7, dtype=torch.long), "both": True}


def three_ranks() -> dict[str, Any]:
    return transformer(lambda: AutoTPStrategy(3, 1), 3)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    chosen = selected(request, "variant")
    return run_trainer_ranks(two_ranks, 2, [each for each in VARIANTS if each not in REPEATS or each in chosen])


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return run_trainer_ranks(three_ranks, 3)


@pytest.mark.parametrize("variant", nightly(VARIANTS, REPEATS))
def test_training_equals_one_process(two: list[dict[str, Any]], variant: str) -> None:
    wanted = run("auto", 1, variant)
    L.seed_everything(3, verbose=False)
    untrained = Loop(variant).state_dict()
    assert max((wanted["weights"][name] - weight).abs().max() for name, weight in untrained.items()) > 0.01
    for seen in two:
        found = seen[variant]
        assert_parity({**found, "gradients": []}, {**wanted, "gradients": []})
        assert_same_norms(found["norms"], wanted["norms"])
        assert_same_norms([found["largest"]], [wanted["largest"]])
        assert found["rates"] == wanted["rates"]
        assert found["logged"] == wanted["logged"]
    if variant == "clipped":
        assert wanted["norms"][0]["grad_2.0_norm_total"] > 0.3


def test_variants_are_what_they_say(two: list[dict[str, Any]]) -> None:
    seen = two[0]
    assert len(seen["two optimizers"]["losses"]) == 16
    assert len(seen["accumulated"]["losses"]) == 11  # eight in an epoch, whose last step takes the last two
    first = "grad_2.0_norm/model.first.2.weight"
    assert first not in seen["thawed"]["norms"][3]
    assert first in seen["thawed"]["norms"][4]
    assert seen["thawed"]["rates"][-1] == [0.5, 0.3]
    assert "grad_2.0_norm/model.table.weight" not in seen["frozen"]["norms"][0]
    second = "grad_2.0_norm/model.second.0.weight"
    assert [second in norms for norms in seen["unused"]["norms"][:4]] == [True, False, True, False]
    assert "grad_2.0_norm_total" in seen["groups"]["logged"]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return transformer(lambda: "auto", 1)


@pytest.mark.parametrize("clipping", CLIPPING)
def test_clipping_and_norms_with_heads_that_ranks_share(
    three: list[dict[str, Any]], alone: dict[str, dict[str, Any]], clipping: str
) -> None:
    wanted = alone[clipping]
    assert wanted["norms"][0]["grad_2.0_norm_total"] > 0.3
    assert [seen[clipping]["shared"] > 0 for seen in three] == [True, True, False]  # the third has a head to itself
    for seen in three:
        assert_parity(seen[clipping], wanted)
        assert_same_norms(seen[clipping]["norms"], wanted["norms"])


@pytest.mark.parametrize("optimizer", ["Muon", "Adafactor"])
def test_optimizers_for_whole_tensors_are_refused_on_every_rank(two: list[dict[str, Any]], optimizer: str) -> None:
    for seen in two:
        assert seen[optimizer].startswith(f"ValueError: {optimizer} computes its update from whole tensors")
        assert "which has " in seen[optimizer]
