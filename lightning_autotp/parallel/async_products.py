"""Products that overlap with the gather before them or the reduce-scatter after them, in compiled code.

With sequence parallelism a column-parallel region's input is gathered, and a row-parallel layer's result is
reduce-scattered. torch's asynchronous tensor parallelism takes such a pair apart and computes with the parts that are
there while others travel, through memory that the ranks' devices share. It does so in what ``torch.compile`` makes:
inductor looks in each graph for a collective next to a product. :mod:`.collectives` writes gathers and reduce-scatters
in the form that it knows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_autotp.private.distributed_private import FusedProducts, share_memory
from lightning_autotp.private.torch_private import has_values, is_compiled


class AsyncTensorParallelError(RuntimeError):
    """Asynchronous tensor parallelism was asked for, and cannot be had here."""


def overlap_products(process_group: dist.ProcessGroup) -> FusedProducts:
    """Let inductor overlap products with collectives of a group, in all that it compiles from now on. Collective.

    Args:
        process_group: the tensor-parallel group.

    Returns:
        What counts them.

    Raises:
        AsyncTensorParallelError: if the ranks' devices cannot share memory.
    """
    why = _why_not(process_group)
    if why:
        raise AsyncTensorParallelError(
            f"async_tensor_parallel=True needs devices that share memory, and {why}. Run on CUDA devices of one machine"
            " that NVLink connects, or leave it out: sequence_parallel=True works without"
        )
    return FusedProducts()


def _why_not(process_group: dist.ProcessGroup) -> str:
    """Why the group's devices cannot share memory; empty if they do. Collective where there are CUDA devices."""
    backend = dist.get_backend(process_group)
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if "nccl" not in backend:
        return f"the process group is one of {backend}, not of nccl"
    try:
        share_memory(process_group)
    except RuntimeError as error:
        return f"torch's symmetric memory says: {error}"
    return ""


class ProductReport:
    """Forward pre-hook: an error in the first training step if nothing is compiled; after the second, what was fused.

    The first one is followed line by line, and so it is not compiled (:mod:`~lightning_autotp.applying.followed_code`).

    Args:
        fused: what counts the products.
    """

    def __init__(self, fused: FusedProducts) -> None:
        self.fused, self.steps = fused, 0

    def __call__(self, module: nn.Module, _: object) -> None:
        """Look, before a forward.

        Raises:
            AsyncTensorParallelError: if nothing of the model is compiled.
        """
        is_traced = torch.compiler.is_compiling() or not has_values(next(module.parameters()))
        if self.steps == 3 or is_traced or not (module.training and torch.is_grad_enabled()):
            return
        if not is_compiled(module):
            raise AsyncTensorParallelError(
                f"async_tensor_parallel=True, but nothing of the {type(module).__name__} is compiled, and only compiled"
                " code overlaps products: compile its blocks in configure_model() or on_fit_start(),"
                " block.compile(fullgraph=True)"
            )
        self.steps += 1
        if self.steps == 3 and dist.get_rank() == 0:
            print(f"lightning_autotp: {self.fused}", flush=True)
