"""Canaries of Lightning and torchmetrics."""

from __future__ import annotations

import os
import signal
import threading
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from canaries import canary
from torch import nn


@canary("lightning.fabric.plugins.collectives.torch_collective.default_pg_timeout")
def _(timeout: Any) -> None:
    assert timeout.total_seconds() >= 60


@canary("lightning.fabric.strategies.ModelParallelStrategy._backward_sync_control")
def _(_: Any) -> None:
    """``fabric.no_backward_sync`` asks it."""
    from contextlib import nullcontext

    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    class Control:
        def no_backward_sync(self, module: Any, enabled: bool) -> Any:
            seen.append((module, enabled))
            return nullcontext()

    seen: list[Any] = []
    strategy = ModelParallelStrategy(lambda module, _: module)
    strategy._backward_sync_control = Control()  # type: ignore[assignment]
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric._strategy = strategy
    module = _wrapped(strategy)
    with fabric.no_backward_sync(module, enabled=True):
        pass
    assert seen == [(module._forward_module, True)]


def _wrapped(strategy: Any) -> Any:
    from lightning.fabric.wrappers import _FabricModule

    return _FabricModule(nn.Linear(1, 1), strategy)


@canary("lightning.fabric.utilities.data._auto_add_worker_init_fn")
def _(add: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_SEED_WORKERS", "1")
        loader = torch.utils.data.DataLoader([0])
        add(loader, 3)
        assert loader.worker_init_fn.keywords == {"rank": 3}


@canary("lightning.pytorch.core.optimizer._init_optimizers_and_lr_schedulers")
def _(make: Any) -> None:
    import lightning as L

    class Two(L.LightningModule):
        def configure_optimizers(self) -> Any:
            made = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2)]
            return made, [torch.optim.lr_scheduler.StepLR(made[0], 1)]

    module = Two()
    module.automatic_optimization = False
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    optimizers, schedulers = make(module)
    assert (len(optimizers), len(schedulers)) == (2, 1)
    module.trainer.strategy.optimizers = optimizers
    assert [one.optimizer for one in module.optimizers()] == optimizers


@canary("lightning.fabric.utilities.seed._collect_rng_states", "lightning.fabric.utilities.seed._set_rng_states")
def _(_: Any) -> None:
    import random

    import numpy as np
    from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

    def drawn() -> list[float]:
        return [torch.rand(1).item(), random.random(), np.random.rand()]

    before = _collect_rng_states(include_cuda=False)
    first = drawn()
    assert drawn() != first
    _set_rng_states(before)
    assert drawn() == first


@canary("lightning.pytorch.Trainer._accelerator_connector")
def _(_: Any) -> None:
    from lightning.pytorch import Trainer

    connector = Trainer(barebones=True, use_distributed_sampler=False, accelerator="cpu")._accelerator_connector
    assert connector.use_distributed_sampler is False
    connector.use_distributed_sampler = True
    assert connector.use_distributed_sampler is True


@canary("lightning.pytorch.strategies.ParallelStrategy._layer_sync")
def _(_: Any) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    for sync in (False, True):
        trainer = Trainer(barebones=True, accelerator="cpu", strategy=ModelParallelStrategy(), sync_batchnorm=sync)
        assert (trainer.strategy._layer_sync is not None) is sync


@canary("lightning.pytorch.loops.fit_loop._FitLoop._data_source")
def _(_: Any) -> None:
    from lightning.pytorch import LightningModule, Trainer

    trainer, loader = Trainer(barebones=True, accelerator="cpu"), torch.utils.data.DataLoader([0])
    trainer._data_connector.attach_data(LightningModule(), train_dataloaders=loader)
    assert trainer.fit_loop._data_source.dataloader() is loader

    class WithHook(LightningModule):
        def train_dataloader(self) -> Any:
            return [loader]

    module = WithHook()
    module.trainer = trainer
    trainer._data_connector.attach_data(module)
    assert trainer.fit_loop._data_source.dataloader() == [loader]


@canary(
    "lightning.pytorch.strategies.ModelParallelStrategy._data_parallel_size",
    "lightning.pytorch.strategies.ModelParallelStrategy._tensor_parallel_size",
)
def _(_: Any) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    made = ModelParallelStrategy(2, "auto", False)
    assert (made._data_parallel_size, made._tensor_parallel_size) == (2, "auto")


@canary(
    "lightning.pytorch.strategies.ModelParallelStrategy._process_group_backend",
    "lightning.pytorch.strategies.ModelParallelStrategy._get_process_group_backend",
    "lightning.fabric.strategies.ModelParallelStrategy._get_process_group_backend",
)
def _(_: Any) -> None:
    """What a user asks for, or else the device's, which is kept in the attribute when processes begin."""
    from lightning.fabric.strategies import ModelParallelStrategy as OfFabric
    from lightning.pytorch.strategies import ModelParallelStrategy

    for kind in (ModelParallelStrategy, partial(OfFabric, parallelize_fn=lambda model, _: model)):
        asked: Any = kind(process_group_backend="mpi")
        assert asked._get_process_group_backend() == asked._process_group_backend == "mpi"
        made: Any = kind()
        assert made._process_group_backend is None
        with mock.patch.object(type(made), "root_device", torch.device("cuda", 0)):
            assert made._get_process_group_backend() == "nccl"


@canary("lightning.pytorch.strategies.ModelParallelStrategy._configure_launcher")
def _(_: Any) -> None:
    """It is called while a Trainer is made, when the devices are known and before there are processes."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    told = []

    class Strategy(ModelParallelStrategy):
        def _configure_launcher(self) -> None:
            told.append((self.num_nodes * self.num_processes, self._data_parallel_size))
            self._data_parallel_size, self._tensor_parallel_size = 2, 1
            super()._configure_launcher()

    Trainer(strategy=Strategy(), devices=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    assert told == [(2, "auto")]


@cache
def averages() -> tuple[Any, Any, list[str]]:
    """A callback that averages a module, the module, and the names of what it called."""
    from lightning.pytorch import LightningModule, Trainer, callbacks

    called = []

    class Averages(callbacks.WeightAveraging):
        def _swap_models(self, pl_module: Any) -> None:
            called.append("_swap_models")
            super()._swap_models(pl_module)

        def _copy_average_to_current(self, pl_module: Any) -> None:
            called.append("_copy_average_to_current")
            super()._copy_average_to_current(pl_module)

    module, trainer = LightningModule(), Trainer(barebones=True, accelerator="cpu")
    module.layer = nn.Linear(1, 1, bias=False)
    made = Averages(device="cpu", use_buffers=False, avg_fn=max)
    made.setup(trainer, module, "fit")
    nn.init.ones_(module.layer.weight)
    nn.init.zeros_(made._average_model.module.layer.weight)
    seen = []
    for hook in (made.on_validation_epoch_start, made.on_validation_epoch_end, made.on_train_end):
        hook(trainer, module)
        seen.append(module.layer.weight.item())
    assert seen == [0, 1, 0]
    return made, module, called


@canary(
    "lightning.pytorch.callbacks.WeightAveraging._average_model",
    "lightning.pytorch.callbacks.WeightAveraging._device",
    "lightning.pytorch.callbacks.WeightAveraging._kwargs",
    "lightning.pytorch.callbacks.WeightAveraging._use_buffers",
)
def _(_: Any) -> None:
    made, _, _ = averages()
    assert isinstance(made._average_model, torch.optim.swa_utils.AveragedModel)
    assert (torch.device(made._device), made._use_buffers, made._kwargs) == (
        torch.device("cpu"),
        False,
        {"avg_fn": max},
    )


@canary(
    "lightning.pytorch.callbacks.WeightAveraging._swap_models",
    "lightning.pytorch.callbacks.WeightAveraging._copy_average_to_current",
)
def _(_: Any) -> None:
    assert averages()[2] == ["_swap_models", "_swap_models", "_copy_average_to_current"]


@canary(
    "lightning.pytorch.callbacks.ModelSummary._summary",
    "lightning.pytorch.callbacks.ModelSummary._max_depth",
    "lightning.pytorch.utilities.model_summary.ModelSummary._get_summary_data",
)
def _(_: Any) -> None:
    """What a callback's own _summary gives is shown, by its columns."""
    from lightning.pytorch import LightningModule, Trainer, callbacks
    from lightning.pytorch.utilities.model_summary import ModelSummary

    shown: list[Any] = []

    class Summary(ModelSummary):
        def _get_summary_data(self) -> Any:
            return [*super()._get_summary_data(), ("More", ["here"])]

    class Callback(callbacks.ModelSummary):
        def summarize(self, summary_data: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            shown.append(dict(summary_data))

    module, callback = LightningModule(), Callback(max_depth=3)
    module.layer = nn.Linear(1, 1)
    assert callback._max_depth == 3
    callback._summary = lambda trainer, pl_module: Summary(pl_module, max_depth=callback._max_depth)
    callback.on_fit_start(Trainer(logger=False, accelerator="cpu", enable_checkpointing=False), module)
    assert shown[0]["More"] == ["here"]
    assert [cell.strip() for cell in shown[0]["Params"]] == ["2"]
    assert vars(callback).pop("_summary")
    assert callable(callback._summary)


@canary(
    "lightning.pytorch.utilities.model_summary.ModelSummary._model",
    "lightning.pytorch.utilities.model_summary.ModelSummary._layer_summary",
    "lightning.pytorch.utilities.model_summary.model_summary.LayerSummary._module",
)
def _(_: Any) -> None:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.utilities.model_summary import ModelSummary

    module = LightningModule()
    module.layer = nn.Linear(1, 1)
    made = ModelSummary(module)
    assert made._model is module
    assert [layer._module for layer in made._layer_summary.values()] == [module.layer]


@canary("lightning.pytorch.utilities.model_summary.model_summary.NOT_APPLICABLE")
def _(text: Any) -> None:
    assert isinstance(text, str)


@canary("lightning.pytorch.utilities.model_summary.model_summary.get_human_readable_count")
def _(write: Any) -> None:
    assert (write(12).strip(), write(1234567)) == ("12", "1.2 M")


@canary("torchmetrics.Metric._apply", "torchmetrics.Metric._defaults")
def _(_: Any) -> None:
    """A conversion of what holds a metric goes through _apply, and states begin with the defaults."""
    import torchmetrics

    applied = []

    class Mean(torchmetrics.MeanMetric):
        def _apply(self, fn: Any, exclude_state: Any = "") -> Any:
            applied.append(exclude_state)
            return super()._apply(fn, exclude_state)

    metric = Mean()
    nn.ModuleList([metric]).to(torch.float64)
    assert applied == [""]
    metric._defaults["weight"] = torch.tensor(3.0)
    metric.reset()
    assert metric.weight == 3


@canary("lightning.pytorch.callbacks.ThroughputMonitor._throughputs")
def _(_: Any) -> None:
    """It is filled when the callback is set up, before the strategy is, and what is put there is what measures."""
    from lightning.fabric.utilities.throughput import Throughput
    from lightning.pytorch import LightningModule, Trainer, callbacks
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Other(Throughput):
        def compute(self) -> dict[str, Any]:
            measured.append(self.world_size)
            return super().compute()

    class Strategy(SingleDeviceStrategy):
        def setup(self, trainer: Trainer) -> None:
            for stage, made in monitor._throughputs.items():
                monitor._throughputs[stage] = Other(window_size=monitor.kwargs["window_size"], world_size=7)
                assert (made.world_size, made.available_flops) == (1, None)
            super().setup(trainer)

    class Module(LightningModule):
        automatic_optimization = False

        def training_step(self, batch: Any) -> None: ...

        def configure_optimizers(self) -> None: ...

    measured: list[int] = []
    monitor = callbacks.ThroughputMonitor(len, window_size=2)
    fitting = Trainer(
        strategy=Strategy("cpu"), callbacks=monitor, max_epochs=1, log_every_n_steps=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip
    fitting.fit(Module(), torch.utils.data.DataLoader([0, 1, 2]))
    assert measured == [7, 7, 7]


@canary("lightning.pytorch.utilities.exceptions._TunerExitException")
def _(ended: Any) -> None:
    """It ends a run, and is no error."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def training_step(self, batch: Any) -> None: ...

        def configure_optimizers(self) -> None: ...

        def on_fit_start(self) -> None:
            raise ended

    fitting = Trainer(barebones=True, accelerator="cpu")
    fitting.fit(Module(), torch.utils.data.DataLoader([0]))
    assert fitting.state.finished


@canary("lightning.pytorch.strategies.launchers._SubprocessScriptLauncher")
def _(kind: Any) -> None:
    """It gives what the function gives, and signals go to the processes in its list."""
    from lightning.pytorch.plugins.environments import LightningEnvironment

    sent = []

    class Started:
        pid = 0
        send_signal = sent.append
        poll = staticmethod(lambda: 0)
        returncode = 0

    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "0")
        patch.delenv("LOCAL_RANK")
        launcher = kind(LightningEnvironment(), 1, 1)
        assert launcher.launch(lambda number, trainer=None: (number, list(launcher.procs)), 3) == (3, [])
    launcher.procs.append(Started())
    launcher.kill(9)
    assert sent == [9]


@canary("lightning.pytorch.strategies.launchers.subprocess_script._launch_process_observer")
def _(observe: Any) -> None:
    """It looks at the processes that are in the list at that time, kills this one for one that failed, or ends."""
    from lightning.fabric.strategies.launchers import subprocess_script

    class Failed:
        pid, returncode = 0, 3
        send_signal = poll = staticmethod(lambda *_: None)

    def look(failed: list[Any], is_cleared: bool) -> list[Any]:
        killed: list[Any] = []
        clock = mock.Mock(sleep=lambda _: failed.clear() if is_cleared else None)
        with (
            mock.patch.object(subprocess_script, "time", clock),
            mock.patch("os.kill", lambda *sent: killed.append(sent)),
        ):
            observe(failed)
            threads = [thread for thread in threading.enumerate() if thread.name == "child-process-observer"]
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
        return killed

    assert look([Failed()], is_cleared=False) == [(os.getpid(), signal.SIGKILL)]
    assert look([Failed()], is_cleared=True) == []


@canary("lightning.pytorch.strategies.Strategy._launcher")
def _(_: Any) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    made: Any = ModelParallelStrategy()
    made._launcher = "mine"
    assert made.launcher == "mine"


@canary(
    "lightning.pytorch.Trainer._signal_connector",
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._sigterm_notifier_fn",
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._slurm_sigusr_handler_fn",
)
def _(_: Any) -> None:
    """Handlers are looked up when they are registered, and received_sigterm is what the Trainer shows."""
    import os
    import signal

    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    got: list[int] = []
    fitting = Trainer(barebones=True, accelerator="cpu", plugins=[SLURMEnvironment(auto_requeue=True)])
    connector: Any = fitting._signal_connector
    connector._sigterm_notifier_fn = connector._slurm_sigusr_handler_fn = lambda signum, frame: got.append(signum)
    connector.register_signal_handlers()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        connector.teardown()
    assert got == [signal.SIGTERM, signal.SIGUSR1]
    assert not fitting.received_sigterm
    connector.received_sigterm = True
    assert fitting.received_sigterm


@canary("lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor")
def _(_: Any) -> None:
    """It is called before each batch, where there are several ranks."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        automatic_optimization = False

        def on_train_start(self) -> None:
            patch.setattr(torch.distributed, "is_initialized", lambda: True)
            patch.setattr(Trainer, "world_size", 2)

        def training_step(self, batch: Any) -> None:
            called.append("step")
            if len(called) == 4:
                patch.undo()

        def configure_optimizers(self) -> None: ...

    called: list[str] = []
    fitting = Trainer(barebones=True, accelerator="cpu", max_steps=2, max_epochs=1)
    loop: Any = fitting.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: called.append("asked")
    with pytest.MonkeyPatch.context() as patch:
        fitting.fit(Module(), torch.utils.data.DataLoader([0, 1]))
    assert called == ["asked", "step", "asked", "step"]


@canary("lightning.fabric.wrappers._backward_hook")
def _(look: Any) -> None:
    from functools import partial

    from lightning_autotp.private.fabric_private import only_looks

    assert only_looks(partial(look, True))
    assert look(False, None) is None
    with pytest.raises(RuntimeError, match=r"fabric.backward\(loss\)"):
        look(True, None)


@canary("lightning.fabric.strategies.ModelParallelStrategy._data_parallel_size")
def _(_: Any) -> None:
    """What is private of the Trainer's strategy has the same names in Fabric's, which is told of devices alike."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    told = []

    class Strategy(ModelParallelStrategy):
        def _configure_launcher(self) -> None:
            told.append((self.num_nodes * self.num_processes, self._data_parallel_size, self._tensor_parallel_size))
            told.append(self._launcher)

    strategy = Strategy(lambda module, mesh: module, 2, "auto")
    Fabric(strategy=strategy, devices=2, accelerator="cpu")
    assert told == [(2, 2, "auto"), None]
