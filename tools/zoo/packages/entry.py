"""What the zoo needs to know of a model that is not of transformers, and the losses that such models train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils import _pytree as pytree

VOCABULARY = 250
"""Token ids; no multiple of four, so that four ranks hold unequal parts of it."""

CLASSES = 10
BATCH = 3
LENGTH = 17
HIDDEN = 64
HEADS = 4

Batch = dict[str, Any]


def of_output(output: Any, batch: Batch) -> Tensor:
    """The loss that the model itself gives."""
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def towards_noise(output: Any, batch: Batch) -> Tensor:
    """The mean squared difference of the first tensor returned and noise, always the same."""
    found = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
    return F.mse_loss(found, torch.randn(found.shape, generator=Generator().manual_seed(7)).to(found.dtype))


def classified(output: Any, batch: Batch) -> Tensor:
    """Cross-entropy of ``[batch, classes]`` with classes that alternate."""
    return F.cross_entropy(output, torch.arange(output.shape[0]) % CLASSES)


def next_token(output: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of ``[batch, tokens, vocabulary]`` with the tokens of the batch's first entry, one later."""
    ids = next(iter(batch.values()))
    return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
        name: its line on the page.
        build: makes it, tiny and with nothing random in its forward; weights from torch's generator.
        inputs: one batch: what its ``forward`` takes, by name.
        loss: the loss of what it returns for the batch.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[Generator], Batch]
    loss: Callable[[Any, Batch], Tensor] = towards_noise


def tokens(name: str = "x", *more: str) -> Callable[[Generator], Batch]:
    """Token ids ``[3, 17]`` under each of the names; each name's batch is two tokens longer than the one before."""

    def make(generator: Generator) -> Batch:
        return {
            key: torch.randint(VOCABULARY, (BATCH, LENGTH + 2 * number), generator=generator)
            for number, key in enumerate((name, *more))
        }

    return make


def pictures(size: int, name: str = "x") -> Callable[[Generator], Batch]:
    """Pictures ``[3, 3, size, size]``."""

    def make(generator: Generator) -> Batch:
        return {name: torch.randn(BATCH, 3, size, size, generator=generator)}

    return make


def states(name: str, *more: str) -> Callable[[Generator], Batch]:
    """Hidden states ``[3, 17, 64]`` under each of the names; each name's is two tokens longer than the one before."""

    def make(generator: Generator) -> Batch:
        return {
            key: torch.randn(BATCH, LENGTH + 2 * number, HIDDEN, generator=generator)
            for number, key in enumerate((name, *more))
        }

    return make
