"""What decides on a model's graph, as one hash: a plan that was made for the same is looked up by it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_autotp.capture.capture import as_calls
from lightning_autotp.capture.nested import leaves_of


def fingerprint(model: nn.Module, example_inputs: Any, *settings: Any) -> str:
    """A hash of a model's modules, parameters and configuration, of the shape of a batch, and of whatever else counts.

    Of the modules' code, the files that their classes are from count, not what these import: what is looked up by it
    must be checked against the model.

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
        yield f"module {name} {type(module).__module__}.{type(module).__qualname__} {module.extra_repr()}"
        describe = getattr(getattr(module, "config", None), "to_dict", None)
        if describe is not None:
            yield json.dumps(describe(), sort_keys=True, default=str)
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        yield f"tensor {name} {_text(tensor)} like {first.setdefault(id(tensor), name)}"
    for file in sorted({str(vars(sys.modules[type(m).__module__]).get("__file__")) for m in model.modules()}):
        yield f"code {file} {zlib.crc32(Path(file).read_bytes()) if os.path.isfile(file) else ''}"
    yield from (f"batch {path} {_text(leaf)}" for path, leaf in leaves_of(list(map(tuple, as_calls(example_inputs)))))
    yield from map(repr, settings)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} {value.requires_grad}"
    return repr(value)
