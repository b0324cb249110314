"""What FSDP2 gathers for a model's own call, what is in no block, around calls of the model and of parts of it.

FSDP2 gathers that when the model is called, and cuts it again at the end of a backward pass. Until then it is not
gathered anew, whatever is written meanwhile: code that calls the model between a backward pass and the optimizer's step
would have the next batch computed with weights of before the step. And what it gathers for the model, or for a block,
is missing where code calls a part of that instead.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_autotp.capture.capture import device_of
from lightning_autotp.capture.nested import map_tensors
from lightning_autotp.gradients.data_parallel import compute_while_gathered, gather_ahead, gather_when_called
from lightning_autotp.parallel.head_product import are_undone
from lightning_autotp.parameters.state import own_modules, parallel_state
from lightning_autotp.private.distributed_private import is_gathered, prepare_backward
from lightning_autotp.private.torch_private import base_of
from lightning_autotp.proving.call_kinds import surroundings


class GatheredForCall:
    """Lets it be gathered for such calls, and only as long as a backward pass may come, or an optimizer's step.

    Of a model that FSDP2 has not cut nothing is done.

    Args:
        model: a parallel model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_for_call = False  # whether it is gathered for a call without gradients alone, and its logits
        self._block: FSDPModule | None = None  # that is gathered for a call of a module in it

    def __reduce__(self) -> tuple[Any, ...]:
        return GatheredForCall, (self._model,)  # a copy of the model has calls of its own

    def begin(self) -> None:
        """Before a call of the model or of a part of it. Not collective."""
        if isinstance(self._model, FSDPModule):
            self._let_go()
            goes = self._is_for_call or not is_gathered(self._model)
            self._is_for_call = goes and not torch.is_grad_enabled()
            gather_ahead(self._model)

    def begin_part(self, module: nn.Module, path: str) -> None:
        """Before a call of a module in the model. Collective over the copies.

        Raises:
            RuntimeError: with gradients for a module in a block: FSDP2 averages those of the whole block's call.
        """
        if not isinstance(self._model, FSDPModule):
            return
        around, block = self._blocks.get(module, ("", None))
        if block is not None and torch.is_grad_enabled():
            raise RuntimeError(
                f"{path} is called on its own with gradients, which FSDP2 averages over the copies for {around} as a"
                f" whole: call {around} or the whole model, or call it within torch.no_grad()"
            )
        self.begin()
        if (gathers := parallel_state(self._model).gathers) is not None:
            gathers.use(surroundings(device_of(self._model))[1] == gathers.dtype)
        self._model.unshard()
        if block is not None and not is_gathered(block):
            self._block = block
            block.unshard()

    @cached_property
    def _blocks(self) -> dict[nn.Module, tuple[str, FSDPModule]]:
        """For each module in a block that FSDP2 gathers for its own call, the innermost one: its path, and itself."""
        found: dict[nn.Module, tuple[str, FSDPModule]] = {}
        for path, block in own_modules(self._model):
            if path and isinstance(block, FSDPModule):
                found |= dict.fromkeys(block.modules(), (path, block))
                del found[block]
        return found

    def part_returned(self, output: Any) -> Any:
        """After a call of a part that has not failed: what it returns, from which a backward pass may begin."""
        if not isinstance(self._model, FSDPModule) or not torch.is_grad_enabled():
            return output
        output = map_tensors(_of_its_own, output)
        compute_while_gathered(self._model, (), output)
        prepare_backward(self._model, output)
        return output

    def end(self) -> None:
        """After a call, also one that failed. Not collective."""
        if self._block is not None:
            self._block.reshard()
            self._block = None
        if isinstance(self._model, FSDPModule) and not torch.compiler.is_compiling():
            gather_when_called(self._model)
        if (gathers := parallel_state(self._model).gathers) is not None:
            gathers.returned()
        self._let_go()

    def after_step(self, model: FSDPModule) -> None:
        """After an optimizer's step: what of the model is still gathered is of before it. Not collective."""
        model.reshard()
        self._is_for_call = False

    def _let_go(self) -> None:
        """Cut what was gathered for a call without gradients, unless there are logits still to be computed of it."""
        if self._is_for_call and isinstance(self._model, FSDPModule) and not are_undone(self._model.parameters()):
            self._model.reshard()
            self._is_for_call = False


def _of_its_own(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own: code that changes a view in place drops the hooks on its gradient."""
    return tensor.clone() if tensor.requires_grad and base_of(tensor) is not None else tensor
