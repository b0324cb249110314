"""Tensor parallelism times data parallelism: FSDP2 cuts a parallel model's parameters again, over the data axis.

It is PyTorch's own engine (``torch.distributed.fsdp.fully_shard``), applied to each repeated block and then to the
model. To FSDP2 a rank's tensor-parallel part is an ordinary parameter: its rows are dealt out to the copies, gathered
before the block runs, and its gradients come back averaged over the copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_autotp.gradients import hook_gradient
from lightning_autotp.held import fsdp_modules, metas_kept, reshard


def shard_over_data(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the parameters of a parallel model over the data axis, in place. Collective over ``mesh``.

    Scalars cannot be cut: they stay on every rank, and their gradients are not averaged here.

    Args:
        model: a model that :func:`~lightning_autotp.parallelize` made local, with real parameters.
        mesh: the data-parallel ranks, which hold the same tensor-parallel part.
    """
    scalars = {parameter for parameter in model.parameters() if parameter.dim() == 0}
    with metas_kept(model):
        for block in [*repeated_blocks(model), model]:
            fully_shard(block, mesh=mesh, ignored_params=scalars)
    # Tensor hooks act on the gathered parameters, which are the same objects from now on.
    for module in fsdp_modules(model):
        module.unshard()
    gathered = dict(model.named_parameters())
    for name, sums in model.autotp_gradient_sums.items():  # type: ignore[operator, union-attr]
        if name in gathered and gathered[name] not in scalars:
            hook_gradient(gathered[name], sums)
    reshard(model)


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
