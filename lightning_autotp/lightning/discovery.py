"""What a training module is made of: the models in it to parallelize, and the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torchmetrics import Metric

from lightning_autotp.building.recipe import take_recipe
from lightning_autotp.layouts.names import join_names
from lightning_autotp.parameters.state import is_parallel
from lightning_autotp.private.torch_private import parameters_of, uncompiled
from lightning_autotp.private.transformers_private import PreTrainedModel


def copies_of(data_parallel_size: Any) -> tuple[int, int | Literal["auto"]]:
    """How many replicas there are of a model that is sharded over its copies, and how many copies, replicas included.

    Args:
        data_parallel_size: the number of copies, ``"auto"``, or the replicas and the copies that each is sharded over.

    Raises:
        ValueError: for anything else.
    """
    pair = data_parallel_size if isinstance(data_parallel_size, tuple | list) else (1, data_parallel_size)
    is_whole = len(pair) == 2 and all(type(size) is int and size > 0 for size in pair)
    if data_parallel_size != "auto" and not is_whole:
        raise ValueError(
            f"data_parallel_size is {data_parallel_size!r}: it must be a positive number,"
            ' "auto", or two positive numbers, (replicas, shards)'
        )
    return pair[0], "auto" if data_parallel_size == "auto" else pair[0] * pair[1]


def parallel_sizes(devices: int, tensor: int | str, data: int | str) -> tuple[int, int]:
    """The tensor- and data-parallel sizes for a number of devices.

    Raises:
        ValueError: if a size is not a positive number or ``"auto"``, or they do not multiply to ``devices``.
    """
    for name, size in (("tensor_parallel_size", tensor), ("data_parallel_size", data)):
        if size != "auto" and not (isinstance(size, int) and size > 0):
            raise ValueError(f'{name} is {size!r}: it must be a positive number or "auto"')
    copies = 1 if data == "auto" else int(data)
    ranks = max(1, devices // copies) if tensor == "auto" else int(tensor)
    if copies * ranks != devices:
        raise ValueError(
            f"tensor_parallel_size={ranks} times data_parallel_size={copies} is {ranks * copies}, but there are"
            f" {devices} devices (devices times num_nodes): change one of them, or leave a size at"
            ' "auto" (data_parallel_size="auto" is one copy of the model)'
        )
    return ranks, copies


def find_models(
    module: nn.Module, example_inputs: Any = None, names: Sequence[str] = ()
) -> list[tuple[nn.Module, Any]]:
    """The models inside a training module to parallelize, with their inputs; none that are parallel already.

    They are those that are named; else its Hugging Face models, wherever they are; without any, its children that have
    parameters, also those in lists and dicts of modules.

    Args:
        module: the training module.
        example_inputs: for its model; where there are several, or they are named, perhaps a mapping from their names;
            or a function that returns either.
        names: of the models in it (``"student"``, ``"nets.generator"``).

    Raises:
        ValueError: if there is no model, or none of a name.
    """
    inputs = example_inputs() if callable(example_inputs) else example_inputs
    models = _named(module, names) if names else _hugging_face(module)
    if not models:
        models = dict(_children(module))
        if not models:
            raise ValueError(
                f"looking for the model to parallelize in {type(module).__name__}: it has no Hugging Face model"
                " and no child with parameters. Build the model in configure_model() or __init__() and assign it to an"
                " attribute"
            )
        if inputs is None and len(models) == 1:
            inputs = getattr(module, "example_input_array", None)
    given = set(inputs) & models.keys() if isinstance(inputs, Mapping) and (names or len(models) > 1) else set()
    if given and (strangers := sorted(set(inputs) - given)):
        raise ValueError(
            f"example_inputs are for {join_names(sorted(given))}, and also for {join_names(strangers)}, but the models"
            f" of {type(module).__name__} are {join_names(list(models))}"
        )
    found = {name: inputs.get(name) if given else inputs for name in models}
    return [(model, found[name]) for name, model in models.items() if not is_parallel(model)]


def _named(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Models by their names.

    Raises:
        ValueError: if there is none of a name, or one is inside another.
    """
    inside = dict(module.named_modules())
    for name in names:
        if name not in inside or not name:
            raise ValueError(
                f"models= names {name!r}, which {type(module).__name__} does not have; its children are"
                f" {join_names([child for child, _ in module.named_children()])}"
            )
        if around := next((other for other in names if name.startswith(f"{other}.")), None):
            raise ValueError(f"models= names {name!r}, which is inside {around!r}: name one of them")
    return {name: uncompiled(inside[name]) for name in names}


def _hugging_face(module: nn.Module) -> dict[str, nn.Module]:
    names = {inner: name for name, inner in module.named_modules()}
    return {names[model]: model for model in outermost(module, PreTrainedModel)}


def _children(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters that can be called, but for metrics."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child, f"{path}{name}.")
        elif not isinstance(child, Metric) and next(child.parameters(), None) is not None:
            yield path + name, uncompiled(child)


def outermost(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    """The modules of a kind that are in ``module`` but not in another one of that kind."""
    for child in module.children():
        if isinstance(child, kind):
            yield child
        else:
            yield from outermost(child, kind)


def fill_remaining(module: nn.Module) -> None:
    """Make real what ``configure_model()`` built outside the parallel models, with the values one process would have.

    Raises:
        RuntimeError: for a parameter on the meta device whose values are not known.
    """
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, parameter in parameters_of(owner).items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in filled:
                make = take_recipe(parameter)
                if make is None:
                    raise RuntimeError(
                        f"parameter {path + '.' if path else ''}{name} is on the meta device and has no values: build"
                        " it in configure_model(), and do not tie it to a parameter inside the parallel model"
                    )
                filled[parameter] = nn.Parameter(make().to(parameter.dtype), requires_grad=parameter.requires_grad)
            parameters_of(owner)[name] = filled[parameter]
