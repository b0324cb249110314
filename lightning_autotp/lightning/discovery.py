"""What a training module is made of: the models in it to parallelize, and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lightning_autotp.building.recipe import take_recipe
from lightning_autotp.parameters.state import is_parallel
from lightning_autotp.private.torch_private import parameters_of, uncompiled


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


def find_models(module: nn.Module, example_inputs: Any = None) -> list[tuple[nn.Module, Any]]:
    """The models inside a training module to parallelize, with their inputs; none that are parallel already.

    They are its Hugging Face models, wherever they are; without any, its one child that has parameters.

    Raises:
        ValueError: if there is no such child, or there are several.
    """
    inputs = example_inputs() if callable(example_inputs) else example_inputs
    models = list(outermost(module, PreTrainedModel))
    if not models:
        children = {
            name: child for name, child in module.named_children() if next(child.parameters(), None) is not None
        }
        if len(children) != 1:
            found = f"has several children with parameters ({', '.join(children)})" if children else "has none"
            raise ValueError(
                f"looking for the model to parallelize in {type(module).__name__}: it holds no Hugging Face model and"
                f" {found}. Build the model in configure_model() or __init__() and assign it to one attribute (parts"
                " that belong together into one nn.Module)"
            )
        models = [uncompiled(child) for child in children.values()]
        inputs = inputs if inputs is not None else getattr(module, "example_input_array", None)
    return [(model, inputs) for model in models if not is_parallel(model)]


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
        RuntimeError: for a parameter on the meta device of which nobody knows the values.
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
