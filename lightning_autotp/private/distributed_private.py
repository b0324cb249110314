"""What is used of ``torch.distributed`` that it does not promise to keep: process groups, collectives, FSDP2, files.

The rest of the package imports it from here, and ``tests/private`` asks each of these names for what is relied
on. Apart from :mod:`.torch_private`, for much of the package works without processes.
"""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_autotp.private.torch_private import writing

collectives = torch.ops._c10d_functional
"""Collectives as operators on a group's name, which torch.compile knows; ``torch.distributed``'s own write in place."""


def communicates(operator: Any) -> bool:
    """Whether an operator that is dispatched waits for other processes, as those of ``torch.distributed`` do."""
    return getattr(operator, "namespace", "") in ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of a registered name. ``group_name`` is public, the way back is not."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def device_of_objects(group: dist.ProcessGroup | None) -> torch.device:
    """Where torch puts objects that a group sends: on the host, if the group takes that. ``None`` is all processes.

    Nothing public says what a group takes.
    """
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def device_to_send(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Where a tensor of this device must be for a group to send it: there, if the group takes that."""
    kinds = {taken.type for taken in group._device_types}
    return device if device.type in kinds else device_of_objects(group)


def share_memory(group: dist.ProcessGroup) -> None:
    """Let the devices of a group read each other's memory. Collective.

    Nothing public enables that for a group by name, which is what operators in compiled code know of it.

    Raises:
        RuntimeError: if they cannot.
    """
    from torch.distributed._symmetric_memory import empty, enable_symm_mem_for_group, rendezvous  # late: it takes long

    enable_symm_mem_for_group(group.group_name)
    rendezvous(empty(1, device=torch.device("cuda", torch.cuda.current_device())), group)


class FusedProducts:
    """Turns on inductor's asynchronous tensor parallelism, and counts what it fuses. Nothing public does either.

    It is on for all that this process compiles, until the :meth:`end` of the last such object.

    Attributes:
        gathered: products that overlap with the gather of their operand.
        scattered: products that overlap with the reduce-scatter of their result.
        graphs: graphs that were compiled.
        counting: the pass that counts.
        was_on: whether it was on before the first such object.
    """

    def __init__(self) -> None:
        import torch._inductor.config as inductor
        from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes

        class Counting(CustomGraphPass):
            def __init__(self, products: FusedProducts) -> None:
                self.products = products

            def __call__(self, graph: torch.fx.Graph) -> None:
                self.products.look_at(graph)

            def uuid(self) -> None:
                """Compile anew instead of taking code from the cache: only what is compiled is counted."""

        self.gathered = self.scattered = self.graphs = 0
        before = get_custom_graph_passes(inductor.post_grad_custom_post_pass)
        others = _counting(before)
        self.counting = Counting(self)
        self.was_on: bool = others[0].was_on if others else inductor._micro_pipeline_tp
        inductor.post_grad_custom_post_pass = [*before, self.counting]
        inductor._micro_pipeline_tp = True

    def end(self) -> None:
        """Count no more; leave it on only if it was before, or another object needs it."""
        import torch._inductor.config as inductor
        from torch._inductor.custom_graph_pass import get_custom_graph_passes

        passes = get_custom_graph_passes(inductor.post_grad_custom_post_pass)
        left = [each for each in passes if each is not self.counting]
        inductor.post_grad_custom_post_pass = left or None
        if not _counting(left):
            inductor._micro_pipeline_tp = self.was_on

    def look_at(self, graph: torch.fx.Graph) -> None:
        """Count what was fused in a graph that is about to become code."""
        self.graphs += 1
        for node in graph.nodes:
            name = str(node.target)
            if "fused_all_gather_matmul" in name or "fused_all_gather_scaled_matmul" in name:
                self.gathered += len(node.args[1])
            self.scattered += "fused_matmul_reduce_scatter" in name or "fused_scaled_matmul_reduce_scatter" in name

    def __str__(self) -> str:
        return (
            f"{self.gathered} products overlap with the gather of their operand and {self.scattered} with the"
            f" reduce-scatter of their result, in {self.graphs} compiled graphs"
        )


def _counting(passes: Sequence[Any]) -> list[FusedProducts]:
    """What counts products among inductor's passes."""
    found = (getattr(each, "products", None) for each in passes)
    return [each for each in found if isinstance(each, FusedProducts)]


def default_store() -> dist.Store:
    """What all processes of the job share. A store of our own would need a port that all know."""
    return dist.distributed_c10d._get_default_store()


_LOST = re.compile(
    r"\[\S*/gloo/transport/\S+\] (Connection closed by peer|Read error|Timed out waiting|Application timeout)"
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says that a process at the other end of a collective, or of the store, is gone or silent.

    ``ProcessGroupGloo`` has one type for all its errors, and only their words tell which it is.
    """
    return isinstance(error, dist.DistNetworkError) or _LOST.match(str(error)) is not None


def is_outermost(module: nn.Module) -> None:
    """Let FSDP2 take this module for the outermost one, whichever of its parts is called first. Nothing public."""
    fully_shard.state(module)._lazy_init()  # type: ignore[attr-defined]


def is_gathered(module: FSDPModule) -> bool:
    """Whether FSDP2 has gathered what it gathers for a module's own call. Nothing public tells it."""
    return any(group.is_unsharded for group in fully_shard.state(module)._fsdp_param_groups)  # type: ignore[attr-defined]


def is_gathered_ahead(module: FSDPModule) -> bool:
    """Whether FSDP2 has begun to gather what a module's own call will take, and the call has not come.

    Nothing public tells it, and FSDP2 itself drops it at the end of a backward pass alone.
    """
    return any(group._all_gather_result is not None for group in fully_shard.state(module)._fsdp_param_groups)  # type: ignore[attr-defined]


def prepare_backward(module: FSDPModule, output: Any) -> None:
    """Let FSDP2 gather a module's parameters before the backward pass of this, and average the gradients at its end.

    So it does with what the module itself returns; nothing public does so with what a part of it returns.
    """
    fully_shard.state(module)._register_pre_backward_hook(output)  # type: ignore[attr-defined]


_GATHERED = "all_gather_outputs", "_unsharded_param"
"""What FSDP2 knows a parameter by that it has gathered once."""


class GatherDtype:
    """In which dtype FSDP2 gathers the parameters of which a policy says one: in that, or as they are stored.

    FSDP2 makes the gathered parameters once, in one dtype. Both sorts are kept, without memory, and one is put where
    FSDP2 finds it. Nothing public.

    Args:
        model: what FSDP2 has cut, and takes for the outermost module.

    Attributes:
        is_lowered: whether it is as the policies say.
        policies: by what is gathered together.
        parameters: FSDP2's of these.
        others: for each, the gathered parameter of the dtype that is not used now.
    """

    def __init__(self, model: nn.Module) -> None:
        states = [fully_shard.state(each) for each in model.modules() if isinstance(each, FSDPModule)]  # type: ignore[attr-defined]
        groups = [group for state in states for group in state._fsdp_param_groups]
        self.is_lowered = True
        self.policies = {group: group.mp_policy for group in groups if group.mp_policy.param_dtype is not None}
        self.parameters = [parameter for group in self.policies for parameter in group.fsdp_params]
        self.others: list[dict[str, Any]] = [{"all_gather_outputs": []} for _ in self.parameters]

    def use(self, is_lowered: bool) -> None:
        """Gather so from now on. Not collective: nothing is gathered meanwhile."""
        if is_lowered == self.is_lowered:
            return
        self.is_lowered = is_lowered
        for group, policy in self.policies.items():
            group.reshard()
            group.mp_policy = policy if is_lowered else replace(policy, param_dtype=None)
            group._init_mp_dtypes()
        for number, parameter in enumerate(self.parameters):
            here = vars(parameter)
            other = self.others[number]
            self.others[number] = {name: here.pop(name) for name in _GATHERED if name in here}
            here.update(other)


_PREPARES = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_backward"


def prepares_backward(hook: Any) -> bool:
    """Whether a gradient's hook is the one that FSDP2 puts on what a module returns: it returns the gradient as it is.

    It gathers the module's parameters, and sees to it that the gradients are averaged when the backward pass ends.
    Nothing public tells it from others.
    """
    return f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}" == _PREPARES


class FileSystemWriter(dcp.FileSystemWriter):
    """torch's, which also notes each stored tensor's checksum: ``checksum`` of what its metadata has for the place."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True)
        self.fs = self.noted = _Checksumming()

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's tensors. Everything between two positions that torch asks for is one of them."""
        done = super().write_data(plan, planner)
        for written in done.value():
            place = written.storage_data
            place.checksum = self.noted.checksums[place.relative_path, place.offset, place.length]
        return done


class _Checksumming(FileSystem):
    """Writes files, and knows the CRC-32 of what was written by the file's name, the position and the length."""

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[tuple[str, int, int], int] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file to write, which is done from its beginning to its end."""
        with writing(path), _Summed(path, self.checksums) as stream:
            yield stream


class _Summed(io.BufferedWriter):
    def __init__(self, path: str | os.PathLike[str], checksums: dict[tuple[str, int, int], int]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.file, self.checksums = os.path.basename(path), checksums
        self.begin, self.checksum = 0, 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return super().write(data)

    def tell(self) -> int:
        position = super().tell()
        if position > self.begin:
            self.checksums[self.file, self.begin, position - self.begin] = self.checksum
            self.begin, self.checksum = position, 0
        return position
