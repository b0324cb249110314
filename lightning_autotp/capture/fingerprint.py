"""What decides on a model's graph, as one hash: a plan that was made for the same is looked up by it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from functools import partial
from inspect import isclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.capture.capture import as_calls
from lightning_autotp.capture.nested import leaves_of
from lightning_autotp.parameters.forwards import forward_of, wrapped_in


def fingerprint(model: nn.Module, example_inputs: Any, *settings: Any) -> str:
    """A hash of a model's modules, parameters and configuration, of the shape of a batch, and of whatever else counts.

    Of the modules' code, the files that their classes and forwards are from count, and the names of what is in their
    globals and of what stands in for functions of torch's (kernels are put there), but not what these import: what is
    looked up by it must be checked against the model.

    Args:
        model: the model; only shapes and dtypes of its tensors are read.
        example_inputs: the batch that it is traced with.
        *settings: anything that ``repr`` tells apart.
    """
    lines = hashlib.sha256()
    for line in _lines(model, example_inputs, settings):
        lines.update(f"{line}\n".encode())
    return lines.hexdigest()[:32]


def _lines(model: nn.Module, example_inputs: Any, settings: Iterable[Any]) -> Iterable[str]:
    first: dict[int, str] = {}
    for name, module in model.named_modules():
        yield f"module {name} {_name(type(module))} {module.extra_repr()} runs {_name(forward_of(module))}"
        describe = getattr(getattr(module, "config", None), "to_dict", None)
        if describe is not None:
            yield json.dumps(describe(), sort_keys=True, default=str)
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        yield f"tensor {name} {_text(tensor)} like {first.setdefault(id(tensor), name)}"
    modules = {owner.__module__ for m in model.modules() for owner in (type(m), _innermost(forward_of(m)))}
    for module in sorted(module for module in modules if module in sys.modules):
        file = str(vars(sys.modules[module]).get("__file__"))
        yield f"code {file} {zlib.crc32(Path(file).read_bytes()) if os.path.isfile(file) else ''}"
        yield from (f"global {name} {value}" for name, value in _code_in(vars(sys.modules[module])))
    yield from (f"torch {name} {now}" for name, now in _code_in(vars(F)) if not now.startswith(("torch.", "builtins.")))
    yield from (f"batch {path} {_text(leaf)}" for path, leaf in leaves_of(list(map(tuple, as_calls(example_inputs)))))
    yield from map(repr, settings)


def _code_in(names: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The functions, classes and modules among these, by what they are called themselves."""
    kinds = FunctionType, BuiltinFunctionType, partial, nn.Module
    return [(name, _name(value)) for name, value in sorted(names.items()) if isinstance(value, kinds) or isclass(value)]


def _innermost(function: Any) -> Any:
    """What a method, a ``functools.partial`` and the like are around."""
    return list(wrapped_in(function))[-1]


def _name(value: Any) -> str:
    """What a class or a function is called; of a module, also what it runs."""
    if isinstance(value, nn.Module):
        return f"{_name(type(value))} runs {_name(forward_of(value))}"
    named = value if isclass(value) else _innermost(value)
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}.{named.__qualname__}"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} {value.requires_grad}"
    return repr(value)
