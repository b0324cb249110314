"""A second type of device, which stands in for a GPU: what is on it is not on the host.

Its memory is the host's and the CPU computes, but torch keeps the two apart: an operator with tensors of both is an
error, a value that the host reads is copied, and its collectives take nothing from the host, as nccl's do not.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init as fully_sharded
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_autotp

NAME, BACKEND = "privateuseone", "only_from_device"
SOURCE = Path(__file__).with_suffix(".cpp")
PACKAGE = Path(lightning_autotp.__file__).parent


class _Event:
    """What has happened: the device computes at once."""

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Stream:
    """The only one there is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device(NAME, 0)

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass


class _Module(ModuleType):
    """What ``torch.cuda`` is for CUDA."""

    default_generators = (torch.default_generator,)
    Stream, Event = _Stream, _Event

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return "NVIDIA H100 80GB HBM3"

    def max_memory_allocated(self, device: Any = None) -> int:
        return most_allocated()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class SecondDevice(CPUAccelerator):
    """Lightning's accelerator for it."""

    def setup_device(self, device: torch.device) -> None:
        pass

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0)] * int(devices)


def begin() -> None:
    """Have the device, from now on in this process."""
    library: Any = _library()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module(f"torch.{NAME}"))
    torch.utils.generate_methods_for_privateuse1_backend()

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return library.only_from_device(dist.ProcessGroupGloo(store, rank, size, timeout), make)

    fully_sharded._move_states_to_device = _move  # as torch cannot set the data of one device to that of this one
    torch._C._distributed_c10d.Backend.options = property(library.options_of)  # as those that can be split have
    dist.Backend.register_backend(BACKEND, make, devices=[NAME])
    dist.Backend.backend_capability["gloo"].append(NAME)  # as it names CUDA, which a group of gloo alone is asked for


def _move(parameters: list[Tensor], buffers: list[Tensor], device: torch.device) -> None:
    for tensor in (*parameters, *buffers):
        if tensor.device != device and not tensor.is_meta:
            torch.utils.swap_tensors(tensor, tensor.to(device))


def allocated() -> int:
    """Bytes that are on the device."""
    library: Any = _library()
    return int(library.allocated())


def most_allocated() -> int:
    """The most that was on the device at once, since the process or a :class:`MostAllocated` began."""
    library: Any = _library()
    return int(library.most_allocated())


class MostAllocated:
    """Counts within it.

    Attributes:
        bytes: the most that was on the device at once.
    """

    def __enter__(self) -> Self:
        library: Any = _library()
        library.begin_most_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = most_allocated()


class Waits(TorchDispatchMode):
    """Counts what waits for the device: the host reads a value, or the number of elements of a result.

    Attributes:
        own: operators, and the functions of this package that call them. What other code calls is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if _waits(name, (args, kwargs), result) and (caller := _caller()) is not None:
            self.own[f"{name} in {caller}"] += 1
        return result


_READING = {"nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim", "_local_scalar_dense"}
_COPYING = {"_to_copy", "copy_"}


def _waits(name: str, arguments: tuple[Any, Any], result: Any) -> bool:
    devices = {leaf.device.type for leaf in tree_leaves((arguments, result)) if isinstance(leaf, Tensor)}
    if name in _COPYING:
        args, kwargs = arguments
        is_unwaited = (kwargs or {}).get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        return len(devices) > 1 and not is_unwaited
    return NAME in devices and (name in _READING or name == "lift_fresh")  # the last one is torch.tensor(..., device=)


def _caller() -> str | None:
    """The function of this package that calls, if one does."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            return f"{file.relative_to(PACKAGE).as_posix()}: {frame.f_code.co_qualname}"
        if "lightning" in file.parts:  # what it calls of this package comes back here
            return None
        frame = frame.f_back
    return None


HAS_COMPILER = shutil.which("g++") is not None


def _library() -> ModuleType:
    """The compiled source, which is kept for the next time."""
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"lightning_autotp_second_device_{key}.so"
    with built.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the processes compiles it, for all
        if not built.exists():
            under_way = built.with_suffix(f".{os.getpid()}")
            included = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
            linked = [f"-L{path}" for path in cpp_extension.library_paths()]
            subprocess.run(
                ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=second_device"]
                + [f"-isystem{path}" for path in included]
                + [str(SOURCE), "-o", str(under_way), *linked, "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"],
                check=True,
            )
            under_way.replace(built)
    spec = importlib.util.spec_from_file_location("second_device", built)
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    return library
