"""Parallel layers that did not run although their weights have a gradient: code used the weight and not the layer.

Without gradients nothing tells what became of a weight. There a layer has to run if it did in the trace, where nothing
else leads code past it: it asks for no value of the batch.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autotp.layouts.names import join_names
from lightning_autotp.optimizers.stepping import stepped_by
from lightning_autotp.parallel.layer_runs import NotesRuns

_Layers = list[tuple[str, NotesRuns]]
_PARAMETERS = itemgetter("params")


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
        self._expected: list[tuple[str, NotesRuns, bool]] = []  # in the forward under way: and whether they had run

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

    def expect(self, paths: Collection[str]) -> None:
        """Before a forward without gradients: these layers are to run in it.

        Args:
            paths: where they are.
        """
        self.let_go()
        self._expected = [(path, layer, layer.has_run) for path, layer in self._layers if path in paths]
        for _, layer, _ in self._expected:
            layer.__dict__["has_run"] = False

    def settle(self, _: object = None) -> None:
        """After a forward that has not failed. Not collective.

        Raises:
            BypassedLayer: naming the layers that were to run, and did not.
        """
        silent = [path for path, layer, _ in self._expected if not layer.has_run]
        if silent and not NotesRuns.is_compiled:
            raise BypassedLayer(
                f"{join_names(silent)} of the parallel {type(self.model).__name__} did not run in a call without"
                f" gradients, but where such a call was traced they did. {_said_of(silent)}"
            )

    def let_go(self) -> None:
        """After a forward, also one that failed."""
        for _, layer, had_run in self._expected:
            layer.__dict__["has_run"] = layer.has_run or had_run
        self._expected.clear()

    def check(self, optimizer: Optimizer) -> _Layers:
        """Before a step of an optimizer, of whatever model. Not collective.

        Returns:
            The layers whose weights it steps.

        Raises:
            BypassedLayer: naming the layers that did not run, and whose weights have a gradient all the same.
        """
        layers = self._layers_of(optimizer)
        if not self._has_run or NotesRuns.is_compiled:
            return layers
        silent = [(path, layer.weight) for path, layer in layers if not layer.has_run]
        if not silent or id(layers) in self._stepped:  # a step with the same gradients again
            return layers
        bypassed = [path for path, weight in silent if isinstance(weight, Tensor) and _has_gradient(weight)]
        if bypassed:
            raise BypassedLayer(
                f"{join_names(bypassed)} of the parallel {type(self.model).__name__} did not run, but the weights there"
                f" have a gradient. {_said_of(bypassed)}"
            )
        return layers

    def after_step(self, optimizer: Optimizer) -> None:
        """After a step: what comes then begins anew for the weights that it has stepped.

        Raises:
            BypassedLayer: as before the step, where that has computed the gradients.
        """
        layers = self.check(optimizer)
        self._stepped[id(layers)] = layers

    def _layers_of(self, optimizer: Optimizer) -> _Layers:
        """The layers whose weights an optimizer steps."""
        count = sum(map(len, map(_PARAMETERS, optimizer.param_groups)))
        known = self._owned.get(optimizer)
        if known is None or known[0] != count:
            stepped = set(map(id, stepped_by(optimizer)))
            known = count, [(path, layer) for path, layer in self._layers if id(layer.weight) in stepped]
            self._owned[optimizer] = known
        return known[1]


def _said_of(layers: list[str]) -> str:
    """What goes on there, and what to do."""
    return (
        "Code takes the weight itself, where the trace of the model called the layer. A rank has a part of that weight,"
        " so what it computes is not what one process would. Such code may ask something that is otherwise when it is"
        " traced (an environment variable, a global flag, whether a tensor is fake): call the layer, or keep it whole:"
        f" keep_whole=[{', '.join(map(repr, layers[:2]))}{', ...' if len(layers) > 2 else ''}]"
    )


def _has_gradient(weight: Tensor) -> bool:
    """Whether it has one; zeros may be left of an earlier step."""
    return weight.grad is not None and bool(weight.grad.any())
