"""Weights of parallel layers that got a gradient although their layers did not run: code has taken them by itself."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autotp.layouts.names import join_names
from lightning_autotp.parallel.layer_runs import NotesRuns


class BypassedLayer(RuntimeError):
    """A weight was used without its parallel layer, in a way that was not traced."""


class Bypasses:
    """The parallel layers of a model, and whether each has run since its weight was stepped.

    Args:
        model: a parallel model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, NotesRuns)]
        self._stepped: dict[str, tuple[int, int]] = {}  # gradients that an optimizer has seen: their ids and versions
        self.is_running = False
        for _, layer in self._layers:
            layer.has_run = False

    def check(self, optimizer: Optimizer) -> None:
        """Before an optimizer's step. Not collective.

        Raises:
            BypassedLayer: naming the layers that did not run, and whose weights have a gradient all the same.
        """
        if not self.is_running or NotesRuns.is_compiled:
            return
        silent = [(path, layer) for path, layer in self._layers if not layer.has_run]
        stepped = _stepped_by(optimizer) if silent else set()
        bypassed = [
            path for path, layer in silent if id(_weight(layer)) in stepped and self._has_new_gradient(path, layer)
        ]
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
        if not self.is_running:
            return
        stepped = _stepped_by(optimizer)
        for path, layer in self._layers:
            if id(weight := _weight(layer)) in stepped:
                layer.__dict__["has_run"] = False
                self._stepped[path] = _version(weight)

    def _has_new_gradient(self, path: str, layer: nn.Module) -> bool:
        weight = _weight(layer)
        if weight.grad is None or self._stepped.get(path) == _version(weight):
            return False
        return bool(weight.grad.any())  # zeros may be left of an earlier step


def _stepped_by(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _weight(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight


def _version(weight: Tensor) -> tuple[int, int]:
    return id(weight.grad), -1 if weight.grad is None else weight.grad._version
