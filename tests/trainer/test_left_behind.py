"""After a run nothing of the strategy is left in what the user keeps: the precision plugin, callbacks, the Trainer."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
from accelerate import PartialState
from lightning import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricsMixedPrecision
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch._functorch.autograd_function import custom_function_call
from torch.nn.utils import clip_grad
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils.data import DataLoader
from torchmetrics import SumMetric
from trainer_ranks import run_trainer_ranks
from transformers import modeling_utils
from transformers.utils import hub, import_utils

import lightning_autotp
from lightning_autotp import AutoTPFabricStrategy
from lightning_autotp.lightning.strategy import AutoTPStrategy

PAGE = Path(lightning_autotp.__file__).parent.parent / "docs" / "what-happens-in-a-step.md"


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = layers()
        self.example_input_array = torch.randn(4, 8)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Counted(Small):
    """Counts the rows of an epoch, and of all epochs, by metrics of its own; its model is made anew in each run."""

    def __init__(self, models: int = 1) -> None:
        super().__init__()
        self.rows, self.all_rows, self.number = SumMetric(), SumMetric(), models
        self.counted: list[float] = []

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.model, self.other = layers(), layers() if self.number > 1 else None

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.rows.update(len(batch))
        self.all_rows.update(len(batch))
        loss = self.model(batch) if self.other is None else self.other(self.model(batch))
        return loss.square().mean()  # type: ignore[no-any-return]

    def on_train_epoch_end(self) -> None:
        self.counted.append(self.rows.compute().item())
        self.rows.reset()


class Rows(Callback):
    """Counts the rows of an epoch, and keeps another metric that is never computed."""

    def __init__(self) -> None:
        self.rows, self.all_rows = SumMetric(), SumMetric()
        self.counted: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, output: Any, batch: Tensor, _: int) -> None:
        self.rows.update(len(batch))
        self.all_rows.update(len(batch))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.counted.append(self.rows.compute().item())
        self.rows.reset()


def trainer(strategy: Strategy | str, *callbacks: Callback, devices: int = 1, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=list(callbacks),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def two_runs() -> dict[str, object]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    data = DataLoader(torch.randn(8, 8), batch_size=4)
    first = trainer(AutoTPStrategy(), plugins=[precision])
    first.fit(Small(), data)
    seen: dict[str, object] = {
        "scaler": precision.scaler is scaler,
        "scale": scaler.get_scale(),
        "sampler": first._accelerator_connector.use_distributed_sampler,
    }
    trainer("auto", plugins=[precision]).fit(Small(), data)
    return {**seen, "second scaler": precision.scaler is scaler, "second scale": scaler.get_scale()}


def test_the_scaler_and_the_sampler_are_the_users_again() -> None:
    (seen,) = run_trainer_ranks(two_runs, 1)
    assert seen["scaler"]
    assert seen["scale"] == 64.0 * 2**2, "it has not gone on with the scale of the run"
    assert seen["sampler"], "of the Trainer it was left off"
    assert seen["second scaler"]
    assert seen["second scale"] == 64.0 * 2**4


def with_one_callback() -> tuple[list[float], float]:
    data, rows = DataLoader(torch.randn(8, 8), batch_size=2), Rows()
    for strategy in (AutoTPStrategy(tensor_parallel_size=2), "ddp"):
        trainer(strategy, rows, devices=2).fit(Small(), data)
        if strategy != "ddp":
            all_rows = rows.all_rows.compute().item()
    return rows.counted, all_rows


def test_metrics_of_callbacks_count_all_ranks_again() -> None:
    """With another strategy; what is still to be computed counts each row once."""
    for counted, all_rows in run_trainer_ranks(with_one_callback, 2):
        assert counted == [8.0, 8.0], "two ranks read 8 rows together, by autotp and by ddp"
        assert all_rows == 8.0


class Users:
    """What a user keeps from run to run."""

    def __init__(self) -> None:
        self.module, self.callback = Counted(), Rows()
        self.precision: Any = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        self.trainer: Trainer | None = None
        self.fabrics_precision = FabricsMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))

    def of_trainer(self) -> list[Any]:
        """What of the Trainer may have been replaced: methods on single objects, and a setting."""
        of: Any = self.trainer
        owners = () if of is None else (of._signal_connector, of.fit_loop.epoch_loop)
        methods = [name for owner in owners for name, value in vars(owner).items() if callable(value)]
        return [methods, of is None or of._accelerator_connector.use_distributed_sampler]


def parts_of(*owners: Any) -> list[tuple[str, int]]:
    """What modules, classes and objects have, by identity."""
    return [(name, id(value)) for owner in owners for name, value in vars(owner).items() if not name.startswith("__")]


CHANGED: dict[str, Callable[[Users], Any]] = {
    "hooks of all optimizers": lambda _: [
        list(hooks.values()) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    ],
    "torch's switch for fused attention": lambda _: torch.backends.mha.get_fastpath_enabled(),
    "inductor's pass for asynchronous": lambda _: (inductor._micro_pipeline_tp, inductor.post_grad_custom_post_pass),
    "the Trainer: the precision plugin's clipping and loss scaler": lambda users: (
        parts_of(users.precision),
        users.of_trainer(),
    ),
    "Fabric: the precision plugin's loss scaler": lambda users: parts_of(users.fabrics_precision),
    "the process group of torchmetrics' metrics": lambda users: [
        (metric.process_group, "reset" in vars(metric))
        for of in (users.module, users.callback)
        for metric in (of.rows, of.all_rows)
    ],
    "`sys.excepthook`": lambda _: sys.excepthook,
    "the function by which torch's `clip_grad_norm_`": lambda _: clip_grad._group_tensors_by_device_and_dtype,
    "the classes of tensors of which torch's clipping": lambda _: list(_foreach_supported_types),
    "transformers' reading of weights, how `nn.Parameter` is made": lambda _: parts_of(
        modeling_utils.PreTrainedModel, hub, nn.Parameter, Tensor
    ),
    "transformers' question whether a tensor is fake": lambda _: import_utils.is_fake_tensor,
    "accelerate's record of the number of processes": lambda _: dict(PartialState._shared_state),
    "how torch's autograd functions run under a transform": lambda _: list(custom_function_call.python_key_table),
}
"""The rows of the page's table, by how they begin, and how each is read."""


class Meanwhile(Callback):
    """Notes what is changed in a run."""

    def __init__(self, users: Users, before: dict[str, Any]) -> None:
        self.users, self.before, self.changed = users, before, set[str]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.changed |= changes(self.users, self.before)


def now(users: Users) -> dict[str, Any]:
    return {what: read(users) for what, read in CHANGED.items()}


def changes(users: Users, before: dict[str, Any]) -> set[str]:
    return {what for what, value in now(users).items() if value != before[what]}


def fit(users: Users, strategy: Strategy | str, module: Counted, *callbacks: Callback) -> None:
    """A run after which nobody keeps the Trainer; what metrics have counted is as in one process."""
    data = DataLoader(torch.randn(8, 8), batch_size=2)
    users.trainer = trainer(strategy, users.callback, *callbacks, devices=2, plugins=[users.precision])
    users.trainer.fit(module, data)
    for counting in (module, users.callback):
        if counting.all_rows.update_called:
            assert counting.all_rows.compute() == 8
            counting.all_rows.reset()
    assert users.of_trainer() == [[], True]
    users.trainer = None
    for name in ("log", "log_dict"):  # methods of the module, which Lightning leaves there
        vars(users.callback).pop(name)


def with_fabric(users: Users, before: dict[str, Any]) -> set[str]:
    fabric = Fabric(
        accelerator="cpu",
        devices=2,
        strategy=AutoTPFabricStrategy(example_inputs=torch.ones(4, 8)),
        plugins=[users.fabrics_precision],
    )
    fabric.launch()
    model = fabric.setup_module(layers())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in fabric.setup_dataloaders(DataLoader(torch.randn(8, 8), batch_size=4)):
        fabric.backward(model(batch).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return changes(users, before)


def all_runs() -> dict[str, Any]:
    """What each run has left changed, and the first ones had changed meanwhile."""
    users = Users()
    hub.hf_api()  # transformers makes it when it is asked for first
    fit(users, "ddp", Counted())
    before, seen = now(users), {}
    look = Meanwhile(users, before)
    fit(users, AutoTPStrategy(), users.module, look)
    seen["meanwhile"] = look.changed
    del look
    fit(users, "ddp", users.module)
    gc.collect()
    seen["autotp, then ddp"] = changes(users, before)
    fit(users, AutoTPStrategy(), Counted(models=2))
    gc.collect()
    seen["two models"] = changes(users, before)
    seen["with Fabric"] = with_fabric(users, before)
    with_fabric(users, before)
    gc.collect()
    seen["Fabric, then Fabric"] = changes(users, before)
    seen["counted"] = users.module.counted
    return seen


def test_runs_leave_nothing_outside_of_their_models() -> None:
    """Neither with another strategy afterwards, nor with several models, nor Fabric and again Fabric."""
    of_trainer = "the Trainer: the precision plugin's clipping and loss scaler"
    while_guarded = {
        "hooks of all optimizers",
        "`sys.excepthook`",
        "the function by which torch's `clip_grad_norm_`",
        "the classes of tensors of which torch's clipping",
    }
    for seen in run_trainer_ranks(all_runs, 2):
        assert seen["meanwhile"] == while_guarded | {of_trainer, "the process group of torchmetrics' metrics"}
        assert seen["autotp, then ddp"] == set()
        assert seen["two models"] == set()
        assert seen["with Fabric"] == while_guarded
        assert seen["Fabric, then Fabric"] == {"`sys.excepthook`"}, "Fabric never says that it is over"
        assert seen["counted"] == [8.0, 8.0]


def test_the_page_lists_what_is_looked_at() -> None:
    _, _, section = PAGE.read_text().partition("## What is changed outside the model\n")
    _, _, *rows = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    assert len(rows) == len(CHANGED)
    for row, what in zip(rows, CHANGED, strict=True):
        assert row.startswith(what)
