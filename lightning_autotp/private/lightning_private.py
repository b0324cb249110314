"""What is used of Lightning that it does not promise to keep.

:mod:`lightning_autotp.lightning` imports it from here, and ``tests/private`` asks each of these names for what
is relied on. The classes are Lightning's own, with public names for what a class derived from them needs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from subprocess import Popen
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import ClusterEnvironment

# Seeds a loader's workers by the rank that reads it.
from lightning.fabric.utilities.data import _auto_add_worker_init_fn as add_worker_init_fn

# The random states that all ranks begin with: of Python, numpy and torch. isolate_rng is public and only restores them.
from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import LightningModule, Trainer, callbacks, strategies

# What configure_optimizers() returns, in whichever form, as lists of optimizers and of schedulers.
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers as make_optimizers

# Starts the script once for each other rank of this machine.
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

# A thread that looks at processes every five seconds, and kills this one when one of them has failed.
from lightning.pytorch.strategies.launchers.subprocess_script import _launch_process_observer
from lightning.pytorch.utilities import model_summary

# Ends a run that was only to tune something; nothing has failed.
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException

# How a summary writes numbers, and a cell without one.
from lightning.pytorch.utilities.model_summary.model_summary import NOT_APPLICABLE, get_human_readable_count
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel

from lightning_autotp.private.torch_private import replaced

__all__ = [
    "NOT_APPLICABLE",
    "add_worker_init_fn",
    "collect_rng_states",
    "default_pg_timeout",
    "get_human_readable_count",
    "make_optimizers",
    "set_rng_states",
]


class Launcher(_SubprocessScriptLauncher):
    """Lightning's, which tells the strategy when all hooks of a run are over. No public hook comes after the others.

    Args:
        strategy: whose it is: the Trainer's, or Fabric's.

    Attributes:
        observed: the processes that Lightning's observer looks at, if it does; it ends when there are none.
    """

    def __init__(self, strategy: StrategyInternals) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self.strategy = strategy
        self.observed: list[Popen[bytes]] = []

    @property
    def is_interactive_compatible(self) -> bool:
        """Yes, with one process; with more, :meth:`StrategyInternals.before_start` says what to write instead."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function on every rank; where no launcher starts processes, and none were started, start them."""
        try:
            if self.cluster_environment.creates_processes_externally:
                result = function(*args, **kwargs)
            else:
                if not self.procs:
                    self.strategy.before_start()
                result = super().launch(self.started, function, *args, trainer=trainer, **kwargs)
        except _TunerExitException:
            self.strategy.after_run()
            raise
        self.strategy.after_run()
        return result

    def kill(self, signum: int | signal.Signals) -> None:
        """Send the processes a signal. Those that are ended so, as after Ctrl-C, have not failed, and are forgotten."""
        super().kill(signum)
        if signum == signal.SIGKILL:
            self.procs.clear()
            self.observed.clear()

    def started(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What is called when the processes have been started."""
        self.observed, self.procs = self.procs, [*self.procs]
        self.strategy.after_start(self.procs)
        return function(*args, **kwargs)

    def observe(self, is_to: bool) -> None:
        """Let Lightning's observer look at the processes that were started, or no longer.

        It kills this one without a word, perhaps before it has said why it ends and with which exit code.
        """
        self.observed.clear()
        if is_to and self.procs:
            self.observed = [*self.procs]
            _launch_process_observer(self.observed)


class StrategyInternals:
    """What a strategy does not have publicly: its sizes, and what it asks for when it is told of the devices.

    Mixed into Lightning's strategies, the Trainer's and Fabric's, which have all else that is declared here.
    """

    cluster_environment: ClusterEnvironment | None
    num_nodes: int
    num_processes: int
    world_size: int
    global_rank: int
    root_device: torch.device
    device_mesh: DeviceMesh
    broadcast: Callable[..., Any]
    _tensor_parallel_size: int | Literal["auto"]
    _data_parallel_size: int | Literal["auto"]
    _process_group_backend: str | None

    @property
    def tensor_ranks(self) -> int | str:
        """How many ranks share a copy of the model. Lightning has it only as an argument."""
        return self._tensor_parallel_size

    @property
    def data_ranks(self) -> int | str:
        """How many copies there are."""
        return self._data_parallel_size

    def set_sizes(self, tensor_ranks: int, data_ranks: int) -> None:
        """Decide on both, before there are processes."""
        self._tensor_parallel_size, self._data_parallel_size = tensor_ranks, data_ranks

    def before_launch(self) -> None:
        """Called when the number of devices is known, before processes start. No public hook is."""

    def before_start(self) -> None:
        """Called when this process is about to start those of the other ranks on its machine."""

    def after_start(self, processes: list[Popen[bytes]]) -> None:
        """Called when this process has started those of the other ranks on its machine."""

    def after_run(self) -> None:
        """Called on every rank at the end of what was launched, such as ``trainer.fit``, unless there was an error."""

    def observe_processes(self, is_to: bool) -> None:
        """Let Lightning look whether those that this process started have failed, or no longer."""
        if self._launcher is not None:
            self._launcher.observe(is_to)

    def kill_processes(self) -> None:
        """End the processes that this one started, at once."""
        if self._launcher is not None:
            self._launcher.kill(signal.SIGKILL)

    def _get_process_group_backend(self) -> str:
        """The device's, and gloo beside it for what is on the host. Lightning decides with nothing public."""
        is_asked_for = self._process_group_backend is not None
        backend: str = super()._get_process_group_backend()  # type: ignore[misc]
        kind = self.root_device.type
        return backend if is_asked_for or kind == "cpu" else f"cpu:gloo,{kind}:{backend}"

    def _configure_launcher(self) -> None:
        self.before_launch()
        self._launcher: Any = Launcher(self)


# --- signals ---


class DeferredSignals:
    """What Lightning does when a signal arrives, done on all ranks together, between two batches.

    Lightning's own handlers do it at once: for SIGTERM a broadcast, for SLURM's signal to requeue a checkpoint, which
    takes all ranks here. But the ranks are at different places, and perhaps in another collective. So the handlers only
    write down that a signal came, and an exchange before each batch (Lightning has one there already, before those of
    training) says whether any rank has got one.

    Args:
        trainer: whose handlers are changed, from the next time that they are registered.
        any_rank: given what this rank answers, and whether all ranks are asked or only those of one copy of the model,
            which of the answers are yes on any rank. Collective.

    Attributes:
        agreed: the exception that was raised for SIGTERM on all ranks, if it was.
        replaced: puts Lightning's own back when it is closed.
    """

    ENDED = 128 + signal.SIGTERM
    """The exit code after SIGTERM: a shell's for a process that was ended by it."""

    def __init__(self, trainer: Trainer, any_rank: Callable[[list[bool], bool], list[bool]]) -> None:
        self.agreed: SIGTERMException | None = None
        self.trainer, self.any_rank = trainer, any_rank
        self.asked_to_end = self.asked_to_requeue = False
        self.requeue = trainer._signal_connector._slurm_sigusr_handler_fn
        handlers = {"_sigterm_notifier_fn": self.note_end, "_slurm_sigusr_handler_fn": self.note_requeue}
        self.replaced = ExitStack()
        self.replaced.enter_context(replaced(trainer._signal_connector, **handlers))
        exchange = {"_broadcast_sigterm_tensor": self.between_batches}
        self.replaced.enter_context(replaced(trainer.fit_loop.epoch_loop, **exchange))

    def restore(self) -> None:
        """Put Lightning's own back."""
        self.replaced.close()

    def between_batches(self, everyone: bool = True) -> None:
        """Do what was asked for. Collective.

        Raises:
            SIGTERMException: on every rank, if one got SIGTERM: callbacks may still save. It is an exit with code 143.
        """
        end, requeue = self.any_rank([self.asked_to_end, self.asked_to_requeue], everyone)
        # A signal that came in the meantime was not sent. Unless another rank had it, it is for the next exchange.
        self.asked_to_end = self.asked_to_end and not end
        self.asked_to_requeue = self.asked_to_requeue and not requeue
        if requeue:
            self.requeue(signal.SIGUSR1, None)  # type: ignore[arg-type]
        if end:
            self.trainer._signal_connector.received_sigterm = True
            rank_zero_info("lightning_autotp: a process of the job got SIGTERM, and all of them end here")
            error = SIGTERMException(self.ENDED)
            self.agreed = error if everyone else None
            raise error

    def note_end(self, signum: int, frame: Any) -> None:
        """The handler of SIGTERM."""
        if not self.asked_to_end and (launcher := self.trainer.strategy.launcher) is not None:
            launcher.kill(signum)
        self.asked_to_end = True

    def note_requeue(self, signum: int, frame: Any) -> None:
        """The handler of the signal that SLURM sends before it ends a job."""
        self.asked_to_requeue = True


class BackwardSync:
    """What ``fabric.no_backward_sync`` asks: Lightning's own answer, and one more. Replaces the strategy's.

    Args:
        strategy: of Fabric.
        also: of a module, the context manager for its backward passes without sums.
    """

    def __init__(self, strategy: Any, also: Callable[[Any], AbstractContextManager[None]]) -> None:
        self.own, self.also = strategy._backward_sync_control, also
        strategy._backward_sync_control = self

    @contextmanager
    def no_backward_sync(self, module: Any, enabled: bool) -> Iterator[None]:
        """Both, or nothing where it is not enabled."""
        with self.own.no_backward_sync(module, enabled), self.also(module) if enabled else nullcontext():
            yield


def without_distributed_sampler(trainer: Trainer) -> AbstractContextManager[None]:
    """Within it dataloaders that are made get no distributed sampler. Publicly an argument of the Trainer."""
    return replaced(trainer._accelerator_connector, use_distributed_sampler=False)


def syncs_batch_norms(strategy: strategies.ModelParallelStrategy) -> bool:
    """Whether the Trainer was given ``sync_batchnorm=True``, which it tells strategies alone."""
    return strategy._layer_sync is not None


def training_data(trainer: Trainer) -> Callable[[], Any]:
    """Gives what ``trainer.fit`` was given to train on, or what the hook ``train_dataloader()`` returns.

    ``trainer.train_dataloader`` is public, but is there only when training has begun.
    """
    return trainer.fit_loop._data_source.dataloader


# --- averages ---


class WeightAveraging(callbacks.WeightAveraging):
    """Lightning's, with the average, what it is made of, and a hook around each copy from or to the model."""

    @property
    def average(self) -> AveragedModel | None:
        """The averaged model, if there is one yet."""
        return self._average_model

    @average.setter
    def average(self, made: AveragedModel) -> None:
        self._average_model = made

    @property
    def average_device(self) -> torch.device | str | int | None:
        """Where the average is to be; ``None``: where the model is."""
        return self._device

    @property
    def average_options(self) -> dict[str, Any]:
        """What an ``AveragedModel`` is to be made with, besides the model and the device."""
        return {"use_buffers": self._use_buffers, **self._kwargs}

    def exchanging(self, pl_module: LightningModule) -> AbstractContextManager[None]:
        """Around the exchange of the average and the model, or a copy of one to the other. No public hook is."""
        return nullcontext()

    def _swap_models(self, pl_module: LightningModule) -> None:
        with self.exchanging(pl_module):
            super()._swap_models(pl_module)

    def _copy_average_to_current(self, pl_module: LightningModule) -> None:
        with self.exchanging(pl_module):
            super()._copy_average_to_current(pl_module)


# --- throughput ---


def throughputs_of(monitor: callbacks.ThroughputMonitor) -> dict[Any, Throughput]:
    """What a monitor measures with in each stage, made anew when it is set up. Publicly it only logs."""
    return monitor._throughputs


# --- the summary ---


class ModelSummary(model_summary.ModelSummary):
    """Lightning's, with what it is of, and its columns, which may be changed. Publicly it is text."""

    @property
    def summarized(self) -> LightningModule:
        """What it is of."""
        return self._model

    @property
    def listed(self) -> list[nn.Module]:
        """The modules that have a row."""
        return [layer._module for layer in self._layer_summary.values()]

    def columns(self, usual: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        """The columns to show, each with its cells, given those that Lightning shows."""
        return usual

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.columns(super()._get_summary_data())


@contextmanager
def summarize_with(make: Callable[..., model_summary.ModelSummary], used: Iterable[Any]) -> Iterator[None]:
    """Within it the ModelSummary callbacks among ``used`` (Lightning adds one) show ``make(module, max_depth=...)``.

    Publicly a callback of one's own class would have to be given to the Trainer.
    """
    with ExitStack() as stack:
        for callback in used:
            if isinstance(callback, callbacks.ModelSummary):
                summary = partial(_summary, make, callback._max_depth)
                stack.enter_context(replaced(callback, _summary=summary))
        yield


def _summary(make: Callable[..., Any], depth: int, trainer: Trainer, module: LightningModule) -> Any:
    return make(module, max_depth=depth)
