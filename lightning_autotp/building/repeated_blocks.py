"""A model's repeated blocks, such as a decoder's layers, and activation checkpointing of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_autotp.private.transformers_private import PreTrainedModel


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The composite members of the outermost lists of modules that have at least two of them."""
    for child in model.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        blocks = [member for member in members if next(member.children(), None) is not None]
        yield from blocks if len(blocks) > 1 else repeated_blocks(child)


def blocks_of_their_own(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks that share no parameter with anything outside of them: FSDP2 would untie it."""
    uses = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    for block in repeated_blocks(model):
        inside = Counter(parameter for module in block.modules() for parameter in module.parameters(recurse=False))
        if inside and all(uses[parameter] == count for parameter, count in inside.items()):
            yield block


def checkpoint_blocks(model: nn.Module) -> None:
    """Let the repeated blocks keep only their inputs for the backward pass, which computes them again; in place.

    Hugging Face's models that know how do it themselves, in the blocks that they choose.

    Raises:
        ValueError: if there are none.
    """
    knowing = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and module.supports_gradient_checkpointing
    ]
    for module in knowing:
        # By the newer of its names, where there is one: the other warns.
        enable = getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    done = {inner for module in knowing for inner in module.modules()}
    blocks = [block for block in repeated_blocks(model) if block not in done]
    for block in blocks:
        block.forward = CheckpointedForward(block)
    if not knowing and not blocks:
        raise ValueError(
            f'activation_checkpointing="blocks": {type(model).__name__} has no list of modules (nn.ModuleList,'
            " nn.Sequential) with two blocks or more: leave it out, or call torch.utils.checkpoint.checkpoint in the"
            " model's code"
        )


class CheckpointedForward:
    """A block's ``forward`` that, in training, computes it again in the backward pass.

    It stands where module hooks (FSDP2's) are outside of it, so that they are called once.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block, self.forward = block, block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the block returns."""
        if self.block.training and torch.is_grad_enabled():
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return self.forward(*args, **kwargs)
