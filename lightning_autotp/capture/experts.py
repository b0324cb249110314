"""Modules that hold a mixture's experts, stacked along the first dim of their parameters, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_autotp.capture.tracer import Tracer
from lightning_autotp.operators.graph import ExpertsCall
from lightning_autotp.private.torch_private import parameters_of

Place = int | str
"""An argument's position, or its name."""


@dataclass(frozen=True)
class ExpertInputs:
    """Which of a call's arguments are the tokens, the experts that they choose, and how much each choice counts.

    Attributes:
        hidden: where the tokens are, ``[tokens, hidden]``.
        index: where the numbers of the chosen experts are, ``[tokens, choices]`` integers.
        weights: where the choices' weights are, ``[tokens, choices]``.
    """

    hidden: Place
    index: Place
    weights: Place

    @classmethod
    def found_in(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExpertInputs | None:
        """These arguments of a call; ``None`` where it has other tensors, or it cannot be told which is which."""
        places: dict[Place, Any] = dict(enumerate(args))
        places.update(kwargs)
        tensors = {place: value for place, value in places.items() if isinstance(value, Tensor)}
        index = [place for place, tensor in tensors.items() if not tensor.is_floating_point()]
        if len(tensors) != 3 or len(index) != 1 or any(tensor.ndim != 2 for tensor in tensors.values()):
            return None
        chosen = tensors.pop(index[0])
        weights = [place for place, tensor in tensors.items() if tensor.shape == chosen.shape]
        hidden = [place for place, tensor in tensors.items() if tensor.shape[1] != chosen.shape[1]]
        if len(weights) != 1 or len(hidden) != 1 or tensors[hidden[0]].shape[0] != chosen.shape[0]:
            return None
        return cls(hidden[0], index[0], weights[0])

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens, the chosen experts and the weights in a call's arguments."""
        hidden, index, weights = (
            args[place] if isinstance(place, int) else kwargs[place]
            for place in (self.hidden, self.index, self.weights)
        )
        return hidden, index, weights

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor, index: Tensor, weights: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments with others in their places."""
        others: dict[Place, Tensor] = {self.hidden: hidden, self.index: index, self.weights: weights}
        positional = tuple(others.get(place, value) for place, value in enumerate(args))
        return positional, {name: others.get(name, value) for name, value in kwargs.items()}


def stacked(module: nn.Module) -> int:
    """How many experts a module's own parameters hold, stacked along their first dim; 0 if it is no such module."""
    shapes = [parameter.shape for parameter in parameters_of(module).values() if parameter is not None]
    numbers = {shape[0] if len(shape) > 1 else 0 for shape in shapes}
    matrices = [shape for shape in shapes if len(shape) == 3]
    return numbers.pop() if len(numbers) == 1 and matrices else 0


@contextmanager
def noting_experts(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Note the runs of modules with stacked experts in the graph that is traced.

    Of a run that gives anything but one tensor like its tokens, or in which it cannot be told which argument is what,
    nothing is noted: such a module is not treated as experts.
    """
    given: dict[str, list[tuple[ExpertInputs, list[int]] | None]] = {}

    def before(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = ExpertInputs.found_in(args, kwargs)
            noted = None
            if inputs is not None:
                noted = inputs, [tracer.number_of(tensor) for tensor in inputs.of(args, kwargs)]
            given.setdefault(path, []).append(noted)

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            noted = given[path].pop()
            if noted is None or not isinstance(output, Tensor):
                return
            inputs, (hidden, index, weights) = noted
            tokens, result = tracer.graph.tensors[hidden], tracer.number_of(output)
            if tuple(output.shape) == tokens.shape and tracer.graph.tensors[result].dtype == tokens.dtype:
                places = inputs.hidden, inputs.index, inputs.weights
                tracer.graph.experts.append(ExpertsCall(path, hidden, index, weights, result, places))

        return hook

    handles = []
    try:
        for path, module in model.named_modules():
            if path and stacked(module):
                handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
                handles.append(module.register_forward_hook(after(path)))
        yield
    finally:
        for handle in handles:
            handle.remove()
