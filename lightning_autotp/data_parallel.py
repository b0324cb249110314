"""Tensor parallelism times data parallelism: FSDP2 cuts a parallel model's parameters again, over the data axis.

It is PyTorch's own engine (``torch.distributed.fsdp.fully_shard``), applied to each repeated block and then to the
model. To FSDP2 a rank's tensor-parallel part is an ordinary parameter: its rows are dealt out to the copies, gathered
before the block runs, and its gradients come back averaged over the copies. The cut is made while the parameters are
on meta, so that no rank ever has its whole tensor-parallel part in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_autotp.gradients import Hook, hook_gradient
from lightning_autotp.held import is_cut, metas_kept


def shard_over_data(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the parameters of a local model over the data axis, in place; those on meta stay there.

    Scalars cannot be cut: they stay on every rank, and their gradients are not averaged here.

    Args:
        model: a model whose parameters are its tensor-parallel part, with their metas.
        mesh: the data-parallel ranks, which hold the same tensor-parallel part.
    """
    scalars = {parameter for parameter in model.parameters() if parameter.dim() == 0}
    with metas_kept(model):
        for block in [*repeated_blocks(model), model]:
            fully_shard(block, mesh=mesh, ignored_params=scalars)


def hook_gathered(model: nn.Module) -> None:
    """Let the tensor-parallel gradient sums act on what FSDP2 gathers, before it averages over the copies.

    Collective over the data axis: every group of parameters with such sums is gathered once, one after the other. The
    gathered parameters are the same objects from then on.
    """
    managers = {path: module for path, module in model.named_modules() if isinstance(module, FSDPModule)}
    sums: dict[str, Hook] = model.autotp_gradient_sums  # type: ignore[assignment]
    summed: dict[str, list[str]] = {}
    for name in sums:
        if is_cut(model.get_parameter(name)):
            manager = max((path for path in managers if f"{name}.".startswith(f"{path}." * (path != ""))), key=len)
            summed.setdefault(manager, []).append(name)
    for path, names in summed.items():
        managers[path].unshard()
        for name in names:
            hook_gradient(model.get_parameter(name), sums[name])
        managers[path].reshard()


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The composite members of the outermost lists of modules: a decoder's layers, an encoder's blocks.

    One that shares a parameter with something outside of it is left out, for FSDP2 would untie them.
    """
    uses = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    for child in model.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        blocks = [member for member in members if next(member.children(), None) is not None]
        if len(blocks) < 2:
            yield from repeated_blocks(child)
            continue
        for block in blocks:
            inside = Counter(parameter for module in block.modules() for parameter in module.parameters(recurse=False))
            if inside and all(uses[parameter] == count for parameter, count in inside.items()):
                yield block
