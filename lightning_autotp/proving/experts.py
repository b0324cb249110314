"""Which modules' experts may be distributed whole: those whose code is tried, and gives the same in parts.

A trace does not tell what the code of a mixture's experts does with the numbers of the experts that tokens choose. So
it is tried, on the CPU with random numbers: a small copy of the module, with narrower matrices, must give for all
choices what the copies with some of the experts each give for theirs, added up, and so must all gradients. The copies
run as the parallel model does (:class:`~lightning_autotp.parallel.experts.WholeExperts`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_autotp.applying.replace import set_size
from lightning_autotp.capture.capture import first_line, meta_copy
from lightning_autotp.capture.experts import ExpertInputs, stacked
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.plan import Plan, SizePlan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.operators.graph import ExpertsCall, Graph, Operator
from lightning_autotp.parallel.collectives import take_owned
from lightning_autotp.parallel.experts import WholeExperts
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.private.torch_private import buffers_of, parameters_of
from lightning_autotp.solving.planned import PlanMismatch

_TOKENS = 13
_MULTIPLE = 8  # of which matrices stay, since kernels take rows of whole 16 bytes
_LARGEST = 2**22  # elements of a small copy
_TOLERANCE = 1e-4  # of the largest element


@dataclass(frozen=True)
class ShardableExperts:
    """Which experts may be distributed whole.

    Attributes:
        sizes: by module, the sizes in its code that must be its number of experts on each rank.
        refused: by module, why its experts may not.
    """

    sizes: Mapping[str, tuple[SizePlan, ...]]
    refused: Mapping[str, str]


def shardable_experts(
    model: nn.Module, graph: Graph, ranks: int, planned: Mapping[str, Ownership] | None = None
) -> ShardableExperts:
    """Try the code of every module with stacked experts.

    Args:
        model: the model; it is only looked at.
        graph: its graph.
        ranks: size of the tensor-parallel group.
        planned: by module, which experts each rank is to have; only these modules are tried then. By default as even a
            share as can be.
    """
    sizes: dict[str, tuple[SizePlan, ...]] = {}
    refused: dict[str, str] = {}
    tried: dict[object, tuple[str, ...] | str] = {}
    producers, first_names = graph.producers(), set(graph.parameters.values())
    for call in graph.experts:
        if planned is not None and call.module not in planned:
            continue
        module = model.get_submodule(call.module)
        number, choices = stacked(module), graph.tensors[call.index].shape[1]
        because = _not_shardable(call, module, number, ranks, first_names)
        options = _options(graph, producers, call.index)
        if not because and options is not None and options > number:
            because = f"tokens choose among {options}, of which {number} are its experts"
        if not because:
            shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
            numbers = _numbers(graph, call.module, module, number)
            ownership = Ownership.even(number, ranks) if planned is None else planned[call.module]
            key = type(module), shapes, choices, numbers, call.places, ownership
            if key not in tried:
                tried[key] = _tried(module, call, graph, ownership, numbers)
            found = tried[key]
            if isinstance(found, str):
                because = found
            else:
                local = ownership.local_sizes
                sizes[call.module] = tuple(SizePlan(call.module, name, number, local) for name in found)
        if because:
            refused[call.module] = because
    return ShardableExperts({path: found for path, found in sizes.items() if path not in refused}, refused)


def prove_experts(model: nn.Module, graph: Graph, plan: Plan) -> None:
    """Prove that the experts which a plan shards whole give the same in parts, with the sizes that it says.

    Args:
        model: the original model.
        graph: its graph.
        plan: the plan.

    Raises:
        PlanMismatch: if they do not, naming the module.
    """
    layouts = {use.module: use.layout for use in plan.implementations if IMPLEMENTATIONS[use.name].is_module}
    planned = {path: layout.dims[0][1] for path, layout in layouts.items() if isinstance(layout, Shard)}
    found = shardable_experts(model, graph, plan.ranks, planned)
    for path, because in found.refused.items():
        raise PlanMismatch(f"the plan shards the experts of {path} whole, but {because}")
    for path, needed in found.sizes.items():
        sizes = {str(size) for size in plan.sizes if size.module == path}
        if sizes != set(map(str, needed)):
            raise PlanMismatch(
                f"the plan shards the experts of {path} whole, for which these sizes must become local, and no"
                f" others: {', '.join(map(str, needed)) or 'none'}; the plan says {', '.join(sorted(sizes)) or 'none'}"
            )


def _not_shardable(call: ExpertsCall, module: nn.Module, number: int, ranks: int, first_names: Set[str]) -> str:
    """Why experts may not be sharded, if that can be told without trying them; else empty."""
    if number < ranks:
        return f"there are fewer experts ({number}) than ranks"
    if "forward" in vars(module):
        return "its forward was replaced on the object itself"
    if any(buffer is not None for inner in module.modules() for buffer in buffers_of(inner).values()):
        return "it has buffers, and which of them belong to an expert is not known"
    names = {name for name, _ in module.named_parameters(prefix=call.module)}
    return "" if names <= first_names else "one of its parameters is tied to another one"


def _options(graph: Graph, producers: Mapping[int, Operator], tensor: int) -> int | None:
    """Among how many the numbers in a tensor choose; ``None`` where that is not found."""
    while (operator := producers.get(tensor)) is not None:
        if operator.name == "aten.topk.default":
            shape = graph.tensors[operator.inputs[0]].shape
            return shape[operator.argument("dim")]
        whole = [source for source in operator.inputs if not graph.tensors[source].is_floating]
        if len(whole) != 1:
            return None
        tensor = whole[0]
    return None


def _numbers(graph: Graph, path: str, module: nn.Module, number: int) -> tuple[str, ...]:
    """Integers that the module's code may read and that say how many experts there are."""
    own = [name for name, value in vars(module).items() if type(value) is int and value == number]
    read = [name for name, value in graph.integers.get(path, {}).items() if value == number]
    return tuple(dict.fromkeys([*own, *read]))


def _tried(
    module: nn.Module, call: ExpertsCall, graph: Graph, ownership: Ownership, numbers: tuple[str, ...]
) -> tuple[str, ...] | str:
    """Which of these integers must be a rank's own number of experts; or why no choice of them does."""
    because = ""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        try:
            trial = _Trial(module, call, graph)
        except Exception as error:  # whatever the user's code raises
            return f"a small copy of it fails when it is tried: {_said(error)}"
        for local in dict.fromkeys([numbers, (), *((name,) for name in numbers)]):
            try:
                difference = trial.difference(ownership, local)
            except Exception as error:
                difference = f"its code fails with some of them: {_said(error)}"
            if not difference:
                return local
            because = because or difference
    return because


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


class _Trial:
    """A small copy of a module with experts, its input, and what it computes from it.

    Raises:
        Exception: whatever its code raises.
    """

    def __init__(self, module: nn.Module, call: ExpertsCall, graph: Graph) -> None:
        torch.manual_seed(0)
        self.number = stacked(module)
        lengths = {size for parameter in parameters_of(module).values() if parameter is not None
                   for size in parameter.shape[1:]}  # fmt: skip
        divisor = max(1, math.gcd(*lengths) // _MULTIPLE)
        self.small = {length: length // divisor for length in lengths if length != self.number}
        self.module = self._narrowed(module)
        self.inputs = ExpertInputs(*call.places)
        width, choices = graph.tensors[call.hidden].shape[1], graph.tensors[call.index].shape[1]
        self.hidden = torch.randn(_TOKENS, self.small.get(width, width))
        # Each token's choices differ, as those of a router do; many experts are chosen, not all.
        self.index = torch.stack([torch.randperm(self.number)[:choices] for _ in range(_TOKENS)])
        self.index[self.index == self.number - 1] = 0
        self.weights = torch.rand(_TOKENS, choices)
        self.seed = torch.randn(_TOKENS, self.small.get(width, width))
        self.expected = self._run(self.module)

    def difference(self, ownership: Ownership, local: tuple[str, ...]) -> str:
        """What differs where each rank has its experts, and these integers say how many; empty if nothing does."""
        parts = [self._run(self._part(ownership, rank, local)) for rank in range(ownership.ranks)]
        for name, whole in self.expected.items():
            values = [part[name] for part in parts]
            found = torch.cat(values) if name in parameters_of(self.module) else torch.stack(values).sum(0)
            if found.shape != whole.shape or not torch.isfinite(whole).all():
                return f"its {name} cannot be compared"
            most = whole.abs().max()
            if not (found - whole).abs().max() <= _TOLERANCE * most:
                return f"its {name} in parts is another than in one piece"
            if name != _RESULT and not most:
                return f"its {name} is zero, which proves nothing"
        return ""

    def _narrowed(self, module: nn.Module) -> nn.Module:
        """A copy with random values, whose matrices are narrower."""
        copied = meta_copy(module)
        shapes: dict[tuple[nn.Module, str], tuple[int, ...]] = {}
        for inner in copied.modules():
            for name, parameter in parameters_of(inner).items():
                if parameter is not None:
                    first = parameter.shape[:1] if inner is copied else (self.small.get(parameter.shape[0], 0),)
                    shapes[inner, name] = (*first, *(self.small.get(size, size) for size in parameter.shape[1:]))
        elements = sum(map(math.prod, shapes.values()))
        if elements > _LARGEST:  # before they take memory
            raise ValueError(f"its matrices cannot be narrowed: it has {elements:,} elements")
        for (inner, name), shape in shapes.items():
            setattr(inner, name, nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1])))
        for inner in copied.modules():
            for name, value in list(vars(inner).items()):
                if type(value) is int and value in self.small:
                    setattr(inner, name, self.small[value])
        return copied

    def _part(self, ownership: Ownership, rank: int, local: tuple[str, ...]) -> nn.Module:
        """The copy as a rank has it."""
        part = copy.deepcopy(self.module)
        for name, parameter in list(parameters_of(part).items()):
            if parameter is not None:
                setattr(part, name, nn.Parameter(take_owned(parameter.detach(), 0, ownership, rank)))
        sizes = ownership.local_sizes
        for name in local:
            set_size(part, SizePlan("", name, self.number, sizes), sizes[rank])
        part.forward = WholeExperts(part, ownership, rank)
        return part

    def _run(self, module: nn.Module) -> dict[str, Tensor]:
        """Its result and all gradients."""
        torch.manual_seed(1)  # code that draws random numbers draws others in parts: it differs
        hidden, weights = self.hidden.clone().requires_grad_(), self.weights.clone().requires_grad_()
        values = {self.inputs.hidden: hidden, self.inputs.index: self.index, self.inputs.weights: weights}
        positional = [values[place] for place in range(3) if place in values]
        result = module(*positional, **{str(name): value for name, value in values.items() if isinstance(name, str)})
        (result * self.seed).sum().backward()
        gradients = {"gradient of its tokens": hidden.grad, "gradient of its weights": weights.grad}
        gradients |= {name: parameter.grad for name, parameter in module.named_parameters()}
        missing = [name for name, gradient in gradients.items() if gradient is None]
        if missing:
            raise ValueError(f"{missing[0]} has no gradient")
        return {_RESULT: result.detach(), **{name: value for name, value in gradients.items() if value is not None}}


_RESULT = "result"
