"""Building a model without its memory, so that each parameter can be made later exactly as one process would have it.

Inside :func:`deferred_init` ordinary code builds an ordinary model, except that every ``nn.Parameter`` lies on the meta
device. Everything else (buffers, temporaries) is real. A dispatch mode writes down each operation that makes or changes
a tensor's memory; at the end every parameter gets a :class:`~lightning_autotp.building.recipe.Recipe` at
``parameter.autotp_recipe``, from which :mod:`~lightning_autotp.loading.parameters` makes this rank's part of it.

How it stays exact:

* Tensors are identified by their *storage*, so views, ``.data`` and in-place operations are right by themselves.
* A random operation on a deferred tensor runs once, on scratch memory, so that the generator moves on as it would have;
  its state before that is recorded. Whoever draws next sees the numbers they would have seen.
* Where the code asks for a value (``tensor.item()``, ``torch.nonzero``), it is computed, so control flow is right.
* To Python code a deferred tensor looks as if it were where it would be: initializers skip tensors on meta.

Memory while building: the buffers, the temporaries of the user's own code, and one tensor. What the code makes with
``device="meta"`` itself has no values and gets no recipe.

Recording an initialization to run it later is the idea of torchdistx's ``deferred_init``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.building.recorder import Recorder
from lightning_autotp.private.torch_private import data_of, device_of, is_meta, set_data_of, with_tensors

_active: Recorder | None = None


@contextmanager
def deferred_init() -> Iterator[Recorder]:
    """Within it, parameters are made on the meta device and how to initialize them is recorded.

    On leaving, every parameter made within has ``parameter.autotp_recipe``, which makes the whole tensor with the
    values that ordinary execution would have given it, and torch's generator is where it would have been. Nested uses
    join the outermost one. ``torch`` is as before afterwards, also after an exception (then nothing has a recipe).

    Raises:
        RuntimeError: if another thread is inside one.
    """
    global _active
    if _active is not None:
        if _active.thread != threading.get_ident():
            raise RuntimeError("another thread is building a model without memory; build one model at a time")
        yield _active
        return
    recorder = Recorder()

    def recorded(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def new(cls: Any, data: Tensor | None = None, requires_grad: bool = True) -> Tensor:
            return recorder.new_parameter(original, cls, data, requires_grad)

        return new

    try:
        _active = recorder
        with with_tensors(recorded, _disguise(recorder)), recorder:
            yield recorder
    finally:
        _active = None
    recorder.finish()


def _disguise(recorder: Recorder) -> dict[str, Any]:
    """Attributes of ``torch.Tensor`` by which a deferred tensor looks as if it were where it would be.

    Model code skips its initialization for tensors on meta (``if tensor.is_meta``, ``device.type != "meta"``), and
    moves others to a parameter's device.
    """

    def device(tensor: Tensor) -> torch.device:
        return recorder.ordinary_device(tensor) if recorder.disguised(tensor) else device_of(tensor)

    def of_values(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)
        return lambda tensor, *args, **kwargs: original(recorder.values(tensor), *args, **kwargs)

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # A tensor that is to go where it would be already must stay itself, not become a copy.
        wanted = kwargs.pop("other", None) if not args else args[0]
        if isinstance(wanted, Tensor):
            args = (device(wanted), wanted.dtype, *args[1:])
        elif wanted is not None and not args:
            args = (wanted,)
        if recorder.disguised(tensor):
            where = args[0] if args and isinstance(args[0], str | int | torch.device) else kwargs.get("device")
            if where is not None and torch.device(where) == device(tensor):
                kwargs.pop("device", None)
                dtype = kwargs.pop("dtype", None)
                rest = args[1:] if args and args[0] is where else args
                if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):  # None: Module.to(device)
                    dtype, rest = rest[0], rest[1:]
                args = (dtype or tensor.dtype, *rest)
        return true_to(tensor, *args, **kwargs)

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if not recorder.disguised(tensor) or id(tensor) in memo:
            return true_deepcopy(tensor, memo)
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    def set_data(tensor: Tensor, value: Tensor) -> None:
        deferred = recorder.disguised(tensor)
        set_data_of(tensor, recorder.defer(value) if deferred else recorder.values(value))

    true_to, true_deepcopy = torch.Tensor.to, torch.Tensor.__deepcopy__
    return {
        "device": property(device),
        "is_meta": property(lambda tensor: is_meta(tensor) and not recorder.disguised(tensor)),
        "is_cpu": property(lambda tensor: device(tensor).type == "cpu"),
        "is_cuda": property(lambda tensor: device(tensor).type == "cuda"),
        "data": property(data_of, set_data),
        "to": to,
        "cpu": lambda tensor, **kwargs: tensor.to("cpu", **kwargs),
        "type_as": lambda tensor, other: tensor.to(other),
        "numpy": of_values("numpy"),
        "tolist": of_values("tolist"),
        "__array__": of_values("__array__"),
        "__deepcopy__": deepcopy,
    }
