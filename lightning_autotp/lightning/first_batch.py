"""The size of the first training batch, looked at before training without a trace.

A plan is priced for the tokens of a step. Where nobody says how many these are, the training data do: if a
:class:`~torch.utils.data.DataLoader` over a map-style dataset was given to ``trainer.fit``, its first ``batch_size``
samples are read and collated. That happens in a forked process, as in a loader's worker: what reading changes (random
numbers that augmentations draw, files that a dataset opens, caches it fills) is gone with it, and the loader itself and
its sampler are not asked. A stream cannot be read without moving it on, and hooks such as ``train_dataloader()`` may do
anything (talk to other ranks, for instance): these are not touched.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_autotp.capture.capture import step_size
from lightning_autotp.layouts.step_size import StepSize, TokensPerStep
from lightning_autotp.private.lightning_private import training_data

SECONDS = 20.0
"""How long reading one batch may take."""


def first_batch(trainer: Trainer) -> TokensPerStep:
    """The size of the first batch that the trainer will train on, or why it is not known."""
    if trainer.state.fn != TrainerFn.FITTING:
        return TokensPerStep(source="nominal: nothing is trained")
    data, hook = training_data(trainer)
    if hook:
        return _unknown(f"{hook}() is not called ahead of time")
    return batch_size_of(data)


def batch_size_of(loader: Any) -> TokensPerStep:
    """The size of a loader's first batch, or why it is not known."""
    if not isinstance(loader, DataLoader):
        return _unknown(f"a {type(loader).__name__} cannot be looked into before training")
    if isinstance(loader.dataset, IterableDataset):
        return _unknown("a stream cannot be looked into before training")
    if loader.batch_sampler is not None and loader.batch_size is None:
        return _unknown(f"a {type(loader.batch_sampler).__name__} of your own makes the batches")
    if sys.platform != "linux":
        return _unknown("the training data are looked into on Linux only")
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_read, args=(loader, there), daemon=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # forking beside other threads, as a loader's workers are
            process.start()
        there.close()
        found = here.recv() if here.poll(SECONDS) else f"reading the first batch took more than {SECONDS:.0f} s"
    except EOFError:
        found = "the process that read the first batch ended"
    except (OSError, AssertionError) as error:  # a daemon may have no children
        found = f"no process could be started to read the first batch: {error}"
    finally:
        here.close()
        if process.pid is not None:
            process.kill()
            process.join()
    if isinstance(found, StepSize):
        return TokensPerStep(size=found, source="as the first batch of the training data")
    return _unknown(found)


def _unknown(why: str) -> TokensPerStep:
    return TokensPerStep(source=f"nominal: {why}; tokens_per_step says it")


def _read(loader: DataLoader[Any], pipe: Connection) -> None:
    """In the forked process: send the batch's size, or what went wrong."""
    torch.set_num_threads(1)  # threads of before the fork do not run here
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
        try:
            size = step_size(_tensors(_collated(loader)))
            pipe.send(size if size != StepSize() else "the first batch holds no tensors of more than one row")
        except BaseException as error:  # whatever a dataset does, planning goes on
            pipe.send(f"reading the first batch raised {type(error).__name__}: {error}")


def _collated(loader: DataLoader[Any]) -> Any:
    """What the loader would make of the dataset's first samples."""
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    indices = list(range(min(loader.batch_size or 1, len(dataset))))
    together = getattr(dataset, "__getitems__", None)
    return loader.collate_fn(together(indices) if callable(together) else [dataset[index] for index in indices])


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif is_dataclass(batch):
        yield from _tensors([getattr(batch, field.name) for field in fields(batch)])
    elif isinstance(batch, Mapping | list | tuple):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(item)
