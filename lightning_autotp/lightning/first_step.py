"""The first training step, looked at before training without a trace: how much data it has, how it calls the models.

A plan is proved for one call of the model, and priced for the tokens of a step. Where these are not given, the
training data and ``training_step`` do: if ``trainer.fit`` was given a :class:`~torch.utils.data.DataLoader` over a
map-style dataset, or ``train_dataloader()`` returns one, its first ``batch_size`` samples are read and collated, and
``training_step`` runs with them until it calls the models. That happens in a forked process, as in a loader's worker:
what it changes (random numbers that augmentations draw, files that a dataset opens, caches it fills, attributes that a
hook or a step sets) is gone with it, and the sampler is not asked. Its copies of the parent's sockets are closed first,
so that it cannot talk to other ranks in the parent's name. A stream cannot be read without moving it on: it is not
touched.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset

from lightning_autotp.capture.capture import ExampleCall, meta_copy, on_meta, step_size
from lightning_autotp.capture.nested import map_tensors, tensors_in
from lightning_autotp.layouts.step_size import StepSize, TokensPerStep
from lightning_autotp.private.lightning_private import make_optimizers, training_data
from lightning_autotp.proving.call_kinds import Arguments

SECONDS = 20.0
"""How long looking at the first step may take."""

MOST_VALUES = 2**20
"""Elements of an integer tensor whose values are kept: code may ask for them (lengths, masks, sizes of pictures)."""


@dataclass(frozen=True)
class FirstStep:
    """What is known of the first training step.

    Attributes:
        tokens: how much data it has.
        calls: how it calls each of the models that were asked for; ``None`` where that is not known. Floating-point
            tensors are on the meta device.
        why: why a call is not known, of those that are not.
    """

    tokens: TokensPerStep
    calls: tuple[ExampleCall | None, ...] = ()
    why: str = ""


def first_step(trainer: Trainer, models: Sequence[nn.Module] = ()) -> FirstStep:
    """What the trainer's first training step is given, and how it calls these models."""
    if trainer.state.fn != TrainerFn.FITTING:
        return _unseen("nothing is trained", models)
    return first_step_with(training_data(trainer), trainer.lightning_module, models)


def first_step_with(data: Callable[[], Any], module: LightningModule, models: Sequence[nn.Module] = ()) -> FirstStep:
    """What a module's first training step is given by the loader that ``data`` gives, and how it calls these models.

    Without models ``training_step`` does not run, and only the data are looked at.
    """
    if sys.platform != "linux":
        return _unseen("the training data can be inspected on Linux only", models)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    outside = torch.get_default_dtype()
    process = context.Process(target=_look, args=(data, module, models, outside, there), daemon=True)
    deadline = time.monotonic() + SECONDS
    try:
        # The step's precision begins here: it may ask the GPU what it can do, which a forked process must not.
        precision = module.trainer.precision_plugin.train_step_context() if models else nullcontext()
        with warnings.catch_warnings(), precision:
            warnings.simplefilter("ignore")  # forking beside other threads, as a loader's workers are
            process.start()
        there.close()
        size = _answer(here, deadline, "reading the first batch")
        calls = _answer(here, deadline, "training_step") if models and isinstance(size, StepSize) else size
    except (OSError, AssertionError) as error:  # a daemon may have no children
        size = calls = f"no process could be started to read the first batch: {error}"
    finally:
        here.close()
        if process.pid is not None:
            process.kill()
            process.join()
    if size == StepSize():
        tokens = _unknown("the first batch has no tensors of more than one row")
    elif isinstance(size, StepSize):
        tokens = TokensPerStep(size=size, source="as the first batch of the training data")
    else:
        tokens = _unknown(size)
    if isinstance(calls, tuple):
        return FirstStep(tokens, *calls)
    return replace(_unseen(str(calls), models), tokens=tokens)


def _unseen(why: str, models: Sequence[nn.Module]) -> FirstStep:
    return FirstStep(_unknown(why), (None,) * len(models), why)


def _unknown(why: str) -> TokensPerStep:
    return TokensPerStep(source=f"nominal: {why}; tokens_per_step says it")


def _unreadable(loader: Any) -> str:
    """Why a loader's first batch cannot be known before training; empty if it can."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} cannot be inspected before training"
    if isinstance(loader.dataset, IterableDataset):
        return "a stream cannot be inspected before training"
    if loader.batch_sampler is not None and loader.batch_size is None:
        return f"a {type(loader.batch_sampler).__name__} of your own makes the batches"
    return ""


def _answer(pipe: Connection, deadline: float, what: str) -> Any:
    """What the forked process says next, or what went wrong with it."""
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return f"the process that looked at the first step ended ({what})"
    return f"{what} took more than {SECONDS:.0f} s"


# --- in the forked process ---


class _AllCalled(BaseException):
    """Every model has been called: the rest of the step does not run. Not caught by ``except Exception``."""


def _look(
    data: Callable[[], Any],
    module: LightningModule,
    models: Sequence[nn.Module],
    outside: torch.dtype,
    pipe: Connection,
) -> None:
    """Send the batch's size, then the models' calls; or what went wrong.

    Args:
        data: gives the loader.
        module: whose step is looked at.
        models: those of which calls are wanted.
        outside: the default dtype outside of the step, where this process was forked.
        pipe: where to send.
    """

    def send(found: Any) -> None:
        pipe.send_bytes(pickle.dumps(found))

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # threads of before the fork do not run here
    torch.compiler.set_stance("force_eager")
    dist.group.WORLD = None  # a collective raises, instead of waiting for ranks that know nothing of it
    _close_sockets()  # and whatever else talks cannot do it in the parent's name
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
        doing = "train_dataloader(), called ahead of time,"
        try:
            with _outside_of_step(outside):
                loader = data()
                if why := _unreadable(loader):
                    send(why)
                    return
                doing = "reading the first batch"
                batch = _collated(loader)
                send(step_size(tensors_in(batch)))
                doing = "training_step, run ahead of time,"
                if models:
                    batch = _moved(module, batch)
            if models:
                send(_calls(module, models, batch))
        except BaseException as error:  # whatever a dataset or a step does, planning goes on
            send(f"{doing} raised {type(error).__name__}: {error}")


@contextmanager
def _outside_of_step(dtype: torch.dtype) -> Iterator[None]:
    """Without the step's precision, as batches are read: without autocast on the CPU, and with this default dtype."""
    within = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_default_dtype(within)


def _close_sockets() -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
        except OSError:
            pass  # the one that lists the directory


def _collated(loader: DataLoader[Any]) -> Any:
    """What the loader would make of the dataset's first samples."""
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    indices = list(range(min(loader.batch_size or 1, len(dataset))))
    together = getattr(dataset, "__getitems__", None)
    return loader.collate_fn(together(indices) if callable(together) else [dataset[index] for index in indices])


def _moved(module: LightningModule, batch: Any) -> Any:
    """A batch as the step is given it, but on the CPU."""
    batch = module.trainer.precision_plugin.convert_input(batch)
    return module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)


class _WithoutValues(TorchFunctionMode):
    """What a model returns has no values here, so nor has what is computed of it with other tensors, or its gradients.

    Those that a penalty is computed of (``torch.autograd.grad(critic(x).sum(), x, create_graph=True)``) have the shapes
    of what they are asked for.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(value.is_meta for value in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return tuple(on_meta(value).detach().requires_grad_(kwargs["create_graph"]) for value in args[1])
        args, kwargs = map_tensors(lambda value: value if value.is_meta else on_meta(value), (args, kwargs))
        return func(*args, **kwargs)


def _calls(
    module: LightningModule, models: Sequence[nn.Module], batch: Any
) -> tuple[tuple[ExampleCall | None, ...], str]:
    """How ``training_step`` calls the models, with this batch on the CPU; why it does not call those it does not.

    Raises:
        BaseException: whatever the step raises before it has called one of them.
    """
    found: dict[nn.Module, ExampleCall] = {}

    def recorded(model: nn.Module) -> Any:
        copied = meta_copy(model) if len(models) > 1 else model

        def forward(*args: Any, **kwargs: Any) -> Any:
            found.setdefault(model, _portable(ExampleCall(args, kwargs)))
            if len(found) == len(models):
                raise _AllCalled
            args, kwargs = map_tensors(on_meta, (args, kwargs))
            return copied(*args, **kwargs)

        return forward

    forwards = list(map(recorded, models))
    for model, forward in zip(models, forwards, strict=True):
        vars(model)["forward"] = forward
    for name in ("log", "log_dict", "manual_backward", "clip_gradients"):  # there is nothing to log to yet
        vars(module)[name] = lambda *_, **__: None
    if not module.automatic_optimization:
        _give_optimizers(module)
    taken = inspect.signature(module.training_step).parameters
    why = "training_step does not call it with the first batch"
    try:
        with _WithoutValues():
            module.training_step(batch, *([0] if len(taken) > 1 else []))
    except _AllCalled:
        pass
    except BaseException as error:
        if not found:
            raise
        why = (
            "training_step was run ahead of time, where what other models return has no values, and raised"
            f" {type(error).__name__}: {error}"
        )
    if not found:
        raise RuntimeError("it does not call the model's forward")
    return tuple(found.get(model) for model in models), why


def _give_optimizers(module: LightningModule) -> None:
    """Optimizers for a step that asks for them; they do nothing."""
    strategy = module.trainer.strategy
    strategy.optimizers, strategy.lr_scheduler_configs = make_optimizers(module)
    asked = module.optimizers()
    for optimizer in asked if isinstance(asked, list) else [asked]:
        vars(optimizer)["step"] = lambda *_, **__: None


def _portable(call: ExampleCall) -> ExampleCall:
    """A call that can be sent, with values only of integers, which code may ask for.

    Raises:
        TypeError: if it has an argument of a class of which nothing is known.
    """
    if unknown := Arguments(call).unknown:
        raise TypeError(f"the model is called with a {unknown[0]}, about which nothing is known")

    def one(value: Tensor) -> Tensor:
        if value.is_floating_point() or value.is_complex() or value.numel() > MOST_VALUES:
            return on_meta(value).requires_grad_(value.requires_grad)
        return value.detach().clone()

    return ExampleCall(*map_tensors(one, tuple(call)))
