"""Weights that have a gradient although their parallel layers did not run: code used the weight and not the layer."""

from __future__ import annotations

from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autotp.layouts.names import join_names
from lightning_autotp.parallel.layer_runs import NotesRuns

_Layers = list[tuple[str, nn.Module]]


class BypassedLayer(RuntimeError):
    """A weight was used without its parallel layer, in a way that was not traced."""


class Bypasses:
    """The parallel layers of a model, and whether each has run since its weight was stepped.

    Args:
        model: a parallel model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._owned: WeakKeyDictionary[Optimizer, tuple[int, _Layers]] = WeakKeyDictionary()
        self._stepped: dict[int, _Layers] = {}  # of optimizers that have made a step since the last forward
        self._has_run = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Bypasses, (self.model,)  # a copy of the model has optimizers of its own

    @cached_property
    def _layers(self) -> _Layers:
        """The model's parallel layers."""
        modules = self.model.named_modules()
        return [(path, layer) for path, layer in modules if isinstance(layer, NotesRuns)]

    def end(self) -> None:
        """Leave no note on the layers."""
        for _, layer in self._layers:
            layer.__dict__.pop("has_run", None)

    def begin(self) -> None:
        """Before a forward with gradients."""
        self._has_run = True
        for layers in self._stepped.values():
            for _, layer in layers:
                layer.__dict__["has_run"] = False
        self._stepped.clear()

    def check(self, optimizer: Optimizer) -> None:
        """Before a step of an optimizer, of whatever model. Not collective.

        Raises:
            BypassedLayer: naming the layers that did not run, and whose weights have a gradient all the same.
        """
        if not self._has_run or NotesRuns.is_compiled:
            return
        layers = self._layers_of(optimizer)
        silent = [(path, layer.weight) for path, layer in layers if not layer.has_run]
        if not silent or id(layers) in self._stepped:  # a step with the same gradients again
            return
        bypassed = [path for path, weight in silent if isinstance(weight, Tensor) and _has_gradient(weight)]
        if bypassed:
            raise BypassedLayer(
                f"{join_names(bypassed)} of the parallel {type(self.model).__name__} did not run, but the weights there"
                " have a gradient: code takes the weight itself, where the trace of the model called the layer. A"
                " rank has a part of that weight, so what it computes is not what one process would. Such code may ask"
                " something that is otherwise when it is traced (an environment variable, whether a tensor is fake):"
                " call the layer, or keep it whole:"
                f" keep_whole=[{', '.join(repr(path) for path in bypassed[:2])}{', ...' if len(bypassed) > 2 else ''}]"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """After a step: what comes then begins anew for the weights that it has stepped.

        Raises:
            BypassedLayer: as before the step, where that has computed the gradients.
        """
        self.check(optimizer)
        layers = self._layers_of(optimizer)
        self._stepped[id(layers)] = layers

    def _layers_of(self, optimizer: Optimizer) -> _Layers:
        """The layers whose weights an optimizer steps."""
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        known = self._owned.get(optimizer)
        if known is None or known[0] != count:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            known = count, [(path, layer) for path, layer in self._layers if id(layer.weight) in stepped]
            self._owned[optimizer] = known
        return known[1]


def _has_gradient(weight: Tensor) -> bool:
    """Whether it has one; zeros may be left of an earlier step."""
    return weight.grad is not None and bool(weight.grad.any())
