"""A model's repeated blocks, such as a decoder's layers, and how less of what they compute is kept on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_autotp.private.torch_private import has_values, storage_key
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
        ValueError: if there are no blocks.
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
    if not knowing:
        _refuse_none(model, blocks, "blocks")


def offload_blocks(model: nn.Module) -> None:
    """Let what the repeated blocks keep for the backward pass be in host memory until then; in place.

    Raises:
        ValueError: if there are no blocks.
    """
    blocks = list(repeated_blocks(model))
    for block in blocks:
        block.forward = OffloadedForward(block)
    _refuse_none(model, blocks, "offload")


def _refuse_none(model: nn.Module, blocks: Sequence[nn.Module], option: str) -> None:
    if not blocks:
        raise ValueError(
            f'activation_checkpointing="{option}": {type(model).__name__} has no list of modules (nn.ModuleList,'
            " nn.Sequential) with two blocks or more: leave it out, or do it in the model's code"
            " (torch.utils.checkpoint.checkpoint, torch.autograd.graph.save_on_cpu)"
        )


class _BlockForward:
    """A block's ``forward`` that does something else in training.

    It stands where module hooks (FSDP2's) are outside of it, so that they are called once.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block, self.forward = block, block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the block returns."""
        is_training = self.block.training and torch.is_grad_enabled()
        return self.train(*args, **kwargs) if is_training else self.forward(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """What the block returns, in training."""
        raise NotImplementedError


class CheckpointedForward(_BlockForward):
    """Computes the block again in the backward pass."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """What the block returns, in training."""
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


class OffloadedForward(_BlockForward):
    """Keeps what the block computes in host memory; its parameters stay on the device.

    Attributes:
        host: what takes tensors (``pack_hook``) and gives them back (``unpack_hook``) in place of the host's memory,
            where nothing is computed.
    """

    host: Any = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """What the block returns, in training."""
        stay = {storage_key(parameter) for parameter in self.block.parameters()}
        there = self.host or save_on_cpu(pin_memory=torch.cuda.is_available())

        def pack(tensor: Tensor) -> Any:
            return tensor if storage_key(tensor) in stay or not has_values(tensor) else there.pack_hook(tensor)

        def unpack(packed: Any) -> Tensor:
            found: Tensor = packed if isinstance(packed, Tensor) else there.unpack_hook(packed)
            return found

        with saved_tensors_hooks(pack, unpack):
            return self.forward(*args, **kwargs)
