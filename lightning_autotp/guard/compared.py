"""The running model compared between the ranks: tensors that should be the same on all of them are.

The proof is of traces. A kernel, or code that asks what no trace shows, may compute something else in the run. Then the
tensors between blocks, and their gradients, differ between the ranks where the traced model has the same on each. So in
the first call of each kind, and at rare intervals after it, they are compared where they enter and leave modules. Of a
tensor that is sharded this says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_autotp.capture import vmap as transforms
from lightning_autotp.capture.nested import leaves_of
from lightning_autotp.guard.whole_states import whole_states
from lightning_autotp.layouts.places import Boundary
from lightning_autotp.optimizers.stepping import steps_some_of
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.parameters.whole_tensors import whole_gradients, whole_tensors
from lightning_autotp.private.torch_private import has_values, is_compiled_itself, is_in_backward, without_modes
from lightning_autotp.ranks.fingerprints import Difference, Fingerprints


class DifferentOnRanks(RuntimeError):
    """Ranks compute different values where the model that was proved has the same on all of them."""


class ComparedValues:
    """What the ranks should have alike in a call of a parallel model, forward and backward.

    Args:
        model: the parallel model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._handles: list[RemovableHandle] = []
        self._forward, self._backward = Fingerprints(), Fingerprints()
        self._places: Mapping[Boundary, bool] | None = None  # in a forward that is compared
        self._waits_for_gradients = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ComparedValues, (self.model,)  # a copy of the model has calls of its own

    def begin(self, places: Mapping[Boundary, bool], with_compiled: bool) -> None:
        """Before a forward that is to be compared. Not collective.

        Args:
            places: where tensors are alike, and whether their gradients are.
            with_compiled: whether what is compiled runs uncompiled in it; otherwise hooks there would be compiled.
        """
        self.end()
        self._forward = Fingerprints()
        with without_modes():
            for name, tensor in whole_tensors(self.model):
                self._forward.note(name, tensor)
        self._places = places
        modules = {place.module for place in places}
        state = parallel_state(self.model)
        for module in self.model.modules() if with_compiled else _outside_compiled(self.model):
            path = state.path(module)
            if path and path in modules:
                note = partial(self._note, path)
                self._handles.append(module.register_forward_pre_hook(partial(_before, note), with_kwargs=True))
                self._handles.append(module.register_forward_hook(partial(_after, note)))

    def end(self) -> None:
        """Leave no hook on the model. Not collective."""
        self._places = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def before_step(self, optimizer: Optimizer) -> None:
        """Before an optimizer steps with gradients. Collective after a forward that was compared.

        Raises:
            DifferentOnRanks: naming the first place in the backward pass, or an optimizer's state, on every rank.
        """
        if not self._waits_for_gradients or not steps_some_of(optimizer, self.model.parameters()):
            return
        self._waits_for_gradients = False
        with without_modes():
            for name, gradient in whole_gradients(self.model):
                self._backward.note(f"the gradient of {name}", gradient)
            for name, state in whole_states(self.model, optimizer):
                self._backward.note(name, state)
            self._refuse(self._backward.compare(parallel_state(self.model).group.process_group))

    def _note(self, path: str, side: str, value: Any) -> None:
        places = self._places
        if places is None or torch.compiler.is_compiling() or is_in_backward() or transforms.are_active():
            return
        with without_modes():
            for key, tensor in leaves_of(value):
                with_gradient = places.get(Boundary(path, side, key))
                # Logits that show themselves whole, and the like, are no tensors that are alike. A module may take
                # numbers in one call and indices in the next.
                if with_gradient is None or type(tensor) not in (Tensor, nn.Parameter) or not has_values(tensor):
                    continue
                if not (tensor.is_floating_point() or tensor.is_complex()):
                    continue
                place = f"{_SIDES[side]} of {path or type(self.model).__name__}"
                self._forward.note(place, tensor)
                if with_gradient and tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(partial(self._note_gradient, f"the gradient of {place}"))

    def _note_gradient(self, place: str, gradient: Tensor) -> None:
        if type(gradient) is Tensor and has_values(gradient):
            self._backward.note(place, gradient)

    def settle(self, output: Any) -> None:
        """After a forward that has not failed, with what it returns. Collective, if it is compared.

        Raises:
            DifferentOnRanks: naming the first place in the forward, on every rank.
        """
        if self._places is None:
            return
        self._note("", "out", output)
        self.end()
        self._waits_for_gradients |= torch.is_grad_enabled()
        with without_modes():
            self._refuse(self._forward.compare(parallel_state(self.model).group.process_group))

    def _refuse(self, found: Difference | None) -> None:
        if found is None:
            return
        name = type(self.model).__name__
        norms = ", ".join(f"rank {rank}: {norm:.6g}" for rank, norm in enumerate(found.norms))
        after = f" ({found.before} is still alike)" if found.before else ""
        raise DifferentOnRanks(
            f"the ranks compute different values in {name}, where the model that was planned and proved has the same on"
            f" all of them. The first is {found.place}{after}. The mean of its absolute values is, by rank: {norms}."
            " Something before it does not compute what its trace shows: code that takes the weight of a layer instead"
            " of calling the layer, or goes another way than in the trace (an environment variable, a global flag,"
            " whether a tensor is fake), a kernel that was declared wrongly, or something that only one rank has. Keep"
            " the module whole in which this happens (keep_whole=[...] takes the names of parameters), or make its code"
            " do the same in a trace"
        )


_SIDES = {"in": "an input", "out": "the output"}


def _before(note: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
    note("in", (args, kwargs))


def _after(note: Any, module: nn.Module, args: Any, output: Any) -> None:
    note("out", output)


def _outside_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those in it, without compiled ones: their hooks would be compiled with them."""
    seen = {module}
    waiting = [module]
    while waiting:
        module = waiting.pop()
        if is_compiled_itself(module):
            continue
        yield module
        for child in module.children():
            if child not in seen:
                seen.add(child)
                waiting.append(child)
