"""``model.autotp``: everything that a parallel model knows of itself, in one object, with metas by parameter name.

A parameter *object* says nothing: libraries put others in its place (FSDP2, ``module.to(...)``, adapters, copies). What
a parameter is follows from its name in the model, and a name is that of the module it is in, wherever this module has
been moved to since, and of the parameter in it. Who has a parameter object, or a list of them, asks a
:class:`ParameterTable`, which is made anew from the names when it is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_autotp.building.checkpoint_reading import CheckpointSource
from lightning_autotp.building.recipe import take_recipe
from lightning_autotp.layouts.names import join_names
from lightning_autotp.layouts.plan import ConversionPlan, Plan
from lightning_autotp.parameters.local_blocks import reshard
from lightning_autotp.parameters.lowered_gathers import LoweredGathers
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.parameters.writes import Writes
from lightning_autotp.private.torch_private import WeakIdKeyDictionary, children_of, parameters_of
from lightning_autotp.quantized.noted import as_loaded, format_of
from lightning_autotp.ranks.group import TPGroup

Hook = Callable[[Tensor], Tensor]
"""Takes what a backward pass contributes to a gradient, and returns what is to be added instead."""


class ParameterPlace(NamedTuple):
    """Where a parameter is now.

    Attributes:
        name: its name when the model was divided, by which the state knows it.
        module: the module that has it.
        attribute: its name there.
        meta: what it is.
    """

    name: str
    module: nn.Module
    attribute: str
    meta: ParameterMeta

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself."""
        parameter = parameters_of(self.module)[self.attribute]
        assert parameter is not None
        return parameter


@dataclass(repr=False)
class ParallelState:
    """What a parallel model is; it carries this object as ``model.autotp``.

    A deep copy of the model has a state of its own, of the same plan and group.

    Attributes:
        plan: how the model is divided.
        group: the ranks that share it.
        metas: what each parameter is, by every name it had when the model was divided; tied names share one meta.
        sources: the checkpoint files that the weights are from, by the path of the module that was built from them.
        gradient_sums: what sums a parameter's gradient over the ranks, by its first name, for those that need it.
        gradient_hooks: what puts the hooks on a parameter that its gradients need, by its first name; not for those
            that FSDP2 has cut.
        parts: what its modules take and give that is not Invariant, each as the change of layout that would make it so.
        given: the tensors that its modules were given in the call that was planned: ``(module, key)``.
        modules: the paths of its modules when it was divided, each module's first one.
        forwards: what ran each of its modules when it was divided: a function of its class, or what was on the object.
        writes: which of its parts were written by code that is not known to be right; none of a copy's.
        gathers: which of its parameters FSDP2 gathers in 16 bits, if any.
        ahead: blocks that FSDP2 has cut, each with the next one of its list, which is gathered ahead.
        cpu_offload: whether those that FSDP2 has cut are in host memory.
        loads: how often weights were loaded into it since.
        guard: what checks around every use that it still is what was proved
            (:class:`~lightning_autotp.guard.guard.Guard`).
    """

    plan: Plan
    group: TPGroup
    metas: dict[str, ParameterMeta]
    sources: dict[str, CheckpointSource] = field(default_factory=dict)
    gradient_sums: dict[str, Hook] = field(default_factory=dict)
    gradient_hooks: dict[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    parts: tuple[ConversionPlan, ...] = ()
    given: frozenset[tuple[str, str]] = frozenset()
    modules: tuple[str, ...] = ()
    forwards: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    writes: Writes = field(default_factory=Writes)
    gathers: LoweredGathers | None = None
    ahead: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    cpu_offload: bool = False
    loads: int = 0
    guard: object = None
    # Weak: a part of the model that is thrown away is gone.
    # By id: the hash of a torchmetrics.Metric is another one after each update.
    _paths: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, group: TPGroup) -> ParallelState:
        """The state of a model that is about to be divided by a plan for it: parameters have their original shapes.

        The recipes of the parameters and the sources of the weights, which building left on them, go over to it.

        Raises:
            ValueError: if the plan has two layouts for one parameter.
        """
        layouts = {name: parameter.layout for parameter in plan.parameters for name in parameter.names}
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        state = cls(plan, group, {})
        for parameter, aliases in names.items():
            if len({layouts[name] for name in aliases}) > 1:
                raise ValueError(f"{', '.join(aliases)} are tied, and the plan has several layouts for them")
            format, recipe = format_of(parameter), take_recipe(parameter)
            meta = ParameterMeta(
                names=tuple(aliases),
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                layout=layouts[aliases[0]],
                rank=group.rank,
                ranks=group.size,
                init_fn=recipe if format is None or recipe is None else as_loaded(recipe),
                need_initialize=parameter.is_meta,
                format=format,
            )
            state.metas |= dict.fromkeys(aliases, meta)
        state.modules = tuple(path for path, _ in model.named_modules())
        for path, module in model.named_modules():
            state._paths[module] = path
            source = vars(module).pop("autotp_source", None)
            if isinstance(source, CheckpointSource):
                state.sources[path] = source
        return state

    def path(self, module: nn.Module) -> str | None:
        """A module's path when the model was divided; ``None`` for one that came later."""
        return self._paths.get(module)

    def places(self, model: nn.Module) -> list[ParameterPlace]:
        """Where the parameters of the model that carries this state are now, under all their names.

        A module that was moved, say into an adapter's wrapper, is the same module; one that took another's place is
        known by its path.

        Raises:
            RuntimeError: naming the parameters of which nothing is known, because they came later.
        """
        modules = dict(own_modules(model))
        occupied = {self._paths[module] for module in modules.values() if module in self._paths}
        places: list[ParameterPlace] = []
        strangers: list[str] = []
        for path, module in modules.items():
            before = self._paths.get(module, None if path in occupied else path)
            for attribute in [name for name, parameter in parameters_of(module).items() if parameter is not None]:
                name = None if before is None else dotted(before, attribute)
                if name is None or name not in self.metas:
                    strangers.append(dotted(path, attribute))
                else:
                    places.append(ParameterPlace(name, module, attribute, self.metas[name]))
        if strangers:
            raise RuntimeError(
                f"{join_names(strangers)} joined the parallel {type(model).__name__} after it was divided: it is"
                " not known how they are distributed over the ranks. Add adapters, heads and parametrizations before"
                " (in configure_model()), or put what every rank is to have whole outside of this model"
            )
        return places

    def of_copy(self, copies: Mapping[int, Any]) -> ParallelState:
        """The state of a copy of the model.

        Args:
            copies: the copies of its modules, and of what a deep copy has copied besides, by the ids of these.
        """
        metas = {id(meta): replace(meta) for meta in self.metas.values()}
        made = ParallelState(self.plan, self.group, {name: metas[id(meta)] for name, meta in self.metas.items()})
        made.sources, made.cpu_offload = dict(self.sources), self.cpu_offload
        made.gradient_sums, made.gradient_hooks = dict(self.gradient_sums), dict(self.gradient_hooks)
        made.guard = copies.get(id(self.guard))  # which hooks of a deep copy have
        made.parts, made.given, made.modules = self.parts, self.given, self.modules
        for module, path in self._paths.items():
            if id(module) in copies:
                made._paths[copies[id(module)]] = path
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelState:
        made = self.of_copy(memo)  # the modules were copied before: they come first in the model that carries this
        for module, forward in self.forwards.items():
            made.forwards[memo[id(module)]] = copy.deepcopy(forward, memo)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_paths": list(self._paths.items()),
            "writes": Writes(),
            "gathers": None,
            "ahead": [],
            "forwards": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _paths=WeakIdKeyDictionary(), forwards=WeakIdKeyDictionary())
        for module, path in state["_paths"]:
            self._paths[module] = path

    def __repr__(self) -> str:
        return f"ParallelState({self.plan.model}, rank {self.group.rank} of {self.group.size})"


class ParameterTable:
    """What the parameters in a module are that holds parallel models: their metas, by the parameters as they are now.

    Args:
        module: a parallel model, or a module with one or several inside. Where FSDP2 has left parameters gathered, they
            are put back in place first.

    Attributes:
        group: the tensor-parallel group.

    Raises:
        RuntimeError: if no parallel model is found, or there are parameters in one of which nothing is known, that do
            not have the shape of this rank's part, or that are tied otherwise than when it was divided.
    """

    def __init__(self, module: nn.Module) -> None:
        self.group = model_group(module)
        reshard(module)
        # With the parameters: an id is one object's only as long as it lives.
        self._found: dict[int, tuple[nn.Parameter, ParameterMeta, Hook | None]] = {}
        for model, state in parallel_models(module):
            places = state.places(model)
            refuse_changes(model, misfits(places))
            for place in places:
                parameter, meta = place.parameter, place.meta
                self._found[id(parameter)] = parameter, meta, state.gradient_sums.get(meta.name)

    def meta(self, tensor: Any) -> ParameterMeta | None:
        """The meta of a parameter of the parallel models; ``None`` for what is outside of them: every rank has it."""
        found = self._found.get(id(tensor))
        return None if found is None else found[1]

    def gradient_sum(self, tensor: Any) -> Hook | None:
        """What sums a parameter's gradient over the ranks that share some of it; ``None`` where none do."""
        found = self._found.get(id(tensor))
        return None if found is None else found[2]


def parts_among(places: Iterable[ParameterPlace]) -> dict[str, nn.Parameter]:
    """The parameters at some places of which this rank has a part, by name."""
    return {place.meta.name: place.parameter for place in places if place.meta.is_parallel}


def misfits(places: Iterable[ParameterPlace]) -> list[str]:
    """What is wrong with a model's parameters: another shape than this rank's part, or tied otherwise than before."""
    wrong: list[str] = []
    by_meta: dict[str, ParameterPlace] = {}
    by_parameter: dict[nn.Parameter, ParameterPlace] = {}
    for place in places:
        parameter, meta = place.parameter, place.meta
        tied, same = by_meta.setdefault(meta.name, place), by_parameter.setdefault(parameter, place)
        if tuple(parameter.shape) != meta.local_shape:
            wrong.append(f"{place.name} is {tuple(parameter.shape)}, this rank's part {meta.local_shape}")
        elif tied.parameter is not parameter:
            wrong.append(f"{tied.name} and {place.name} were tied, and are two parameters now")
        elif same.meta.name != meta.name:
            wrong.append(f"{same.name} and {place.name} were two parameters, and are tied now")
    return wrong


def refuse_changes(model: nn.Module, changes: list[str]) -> None:
    """An error, if there are changes of a parallel model with which it would not compute what one process does.

    Raises:
        RuntimeError: naming them.
    """
    if changes:
        raise RuntimeError(
            f"the parallel {type(model).__name__} was changed after it was divided:\n  "
            + "\n  ".join([*changes[:20], *["..."] * (len(changes) > 20)])
            + "\nMake such changes while it is whole, in configure_model() or before parallelize(); load whole tensors"
            " with lightning_autotp.load_full_state_dict"
        )


def is_parallel(module: object) -> bool:
    """Whether a module is a parallel model; one inside or around a parallel model is not."""
    return isinstance(vars(module).get("autotp"), ParallelState)


def parallel_state(model: nn.Module) -> ParallelState:
    """The state of a parallel model, ``model.autotp``."""
    state = model.autotp
    assert isinstance(state, ParallelState)
    return state


def parallel_models(module: nn.Module) -> list[tuple[nn.Module, ParallelState]]:
    """The parallel models that a module is or holds, with their states."""
    return [(child, parallel_state(child)) for child in module.modules() if is_parallel(child)]


def model_group(module: nn.Module) -> TPGroup:
    """The tensor-parallel group of a parallel model, or of a module that has one somewhere inside.

    Raises:
        RuntimeError: if there is none.
    """
    for _, state in parallel_models(module):
        return state.group
    raise RuntimeError(
        f"{type(module).__name__} has no parallel model in it: pass it (or the module that holds the parallel model)"
        " after lightning_autotp.parallelize"
    )


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A parallel model's modules by their paths, each once, without those of other parallel models in it."""
    done: set[nn.Module] = set()
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        if module in done or (module is not model and is_parallel(module)):
            continue
        done.add(module)
        yield path, module
        children = [(dotted(path, name), child) for name, child in children_of(module).items() if child is not None]
        pending += reversed(children)


def dotted(path: str, name: str) -> str:
    """The path of what has a name in the module at a path."""
    return f"{path}.{name}" if path else name
