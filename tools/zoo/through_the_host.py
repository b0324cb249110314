"""A process group for ranks that share one GPU: tensors are copied to the host and sent over gloo, one call at a time.

NCCL refuses two ranks on a device, and gloo's own gathers of CUDA tensors crash (torch 2.11). Only what this package
calls is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

BACKEND = "through_the_host"
_Group: Any = dist.ProcessGroup  # the stubs of which have more ways to call than Python classes need


def begin() -> None:
    """Have the backend, from now on in this process."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, ThroughTheHost, devices=["cpu", "cuda"])


class ThroughTheHost(_Group):
    """Every call is over when it returns."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._size = size

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """As gloo's."""
        for tensor in tensors:
            here = _on_host(tensor)
            self._gloo.allreduce([here], opts or c10d.AllreduceOptions()).wait()
            tensor.copy_(here)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """As gloo's."""
        for tensor in tensors:
            here = _on_host(tensor)
            self._gloo.broadcast([here], opts or c10d.BroadcastOptions()).wait()
            tensor.copy_(here)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """As gloo's."""
        for parts, own in zip(outputs, inputs, strict=True):
            here = [torch.empty(part.shape, dtype=part.dtype) for part in parts]
            self._gloo.allgather([here], [_on_host(own)], opts or c10d.AllgatherOptions()).wait()
            for part, received in zip(parts, here, strict=True):
                part.copy_(received)
        return _done([part for parts in outputs for part in parts])

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        parts = [torch.empty(own.shape, dtype=own.dtype) for _ in range(self._size)]
        self._gloo.allgather([parts], [_on_host(own)]).wait()
        output.copy_(torch.stack(parts).view(output.shape))
        return _done([output])

    all_gather_single = _allgather_base  # its name since torch 2.13

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """One after the other."""
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        here, reduction = _on_host(whole), c10d.AllreduceOptions()
        if opts is not None:
            reduction.reduceOp = opts.reduceOp
        self._gloo.allreduce([here], reduction).wait()
        output.copy_(here.view(self._size, *output.shape)[self.rank()])
        return _done([output])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], wholes: list[Tensor], opts: Any = None) -> Any:
        """One after the other."""
        for output, whole in zip(outputs, wholes, strict=True):
            self._reduce_scatter_base(output, whole, opts)
        return _done(outputs)

    def alltoall_base(
        self, output: Tensor, own: Tensor, to_receive: Sequence[int], to_send: Sequence[int], opts: Any = None
    ) -> Any:
        """As gloo's."""
        here = torch.empty(output.shape, dtype=output.dtype)
        self._gloo.alltoall_base(here, _on_host(own), list(to_receive), list(to_send)).wait()
        output.copy_(here)
        return _done([output])

    def barrier(self, opts: Any = None) -> Any:
        """As gloo's."""
        self._gloo.barrier().wait()
        return _done([])

    def getBackendName(self) -> str:
        """As it was registered."""
        return BACKEND

    supports_splitting = False

    def _get_backend(self, device: torch.device) -> Any:
        """Of any device; torch asks it whether it can be split."""
        return self

    @property
    def group_name(self) -> Any:
        """As torch registered it, which has it of backends alone."""
        return c10d._world.pg_names[self]

    pg_name = group_name


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _done(result: list[Tensor]) -> Any:
    future: Future[list[Tensor]] = Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
