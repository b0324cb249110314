"""Norms and clipping of a parallel model's gradients, and the original model's gradients.

Every element of the original model counts once, however many ranks hold it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autotp.gradients.counted import counted_elements, whole_norms
from lightning_autotp.parameters.gathering import each_once, gather_to_cpu
from lightning_autotp.parameters.local_blocks import counted_blocks, is_cut, plain, shard_group
from lightning_autotp.parameters.state import ParameterTable
from lightning_autotp.private.torch_private import foreach_multiply
from lightning_autotp.ranks.agreement import gather_objects
from lightning_autotp.ranks.group import TPGroup


def gradient_norm(module: nn.Module, norm_type: float = 2.0, *, parameters: Iterable[Tensor] | None = None) -> Tensor:
    """The norm of the original model's gradient: every element counted once, whatever number of ranks hold it.

    Collective over the model's tensor-parallel group, and over the data axis where FSDP2 has cut the parameters.

    Args:
        module: a parallel model after a backward pass, or a module that holds one.
        norm_type: any positive number, or infinity.
        parameters: only these, such as an optimizer's; by default all of the module's. Those without a gradient are
            left out.

    Returns:
        A scalar, float32 or wider, the same on every rank.

    Raises:
        ValueError: if ``norm_type`` is not positive.
        RuntimeError: if no parallel model is found.
    """
    chosen = list(module.parameters() if parameters is None else parameters)
    return torch.linalg.vector_norm(_norms(chosen, ParameterTable(module), norm_type), norm_type)


def grad_norms(module: nn.Module, norm_type: float | int | str = 2.0, group_separator: str = "/") -> dict[str, Tensor]:
    """The norm of every parameter's gradient in the original model, and of all together.

    Collective over the model's tensor-parallel group, and over the data axis where FSDP2 has cut the parameters. In
    one process it is ``lightning.pytorch.utilities.grad_norm``, with the same names: made to be logged, on every rank,
    in ``on_before_optimizer_step``.

    Args:
        module: a parallel model after a backward pass, or a module that holds one.
        norm_type: any positive number, or infinity.
        group_separator: stands between the norm's name and the parameter's.

    Returns:
        Scalars, float32 or wider, the same on every rank. Parameters without a gradient are absent.

    Raises:
        ValueError: if ``norm_type`` is not positive.
        RuntimeError: if no parallel model is found.
    """
    norm_type = float(norm_type)
    table = ParameterTable(module)
    names, parameters = zip(*module.named_parameters(), strict=True)
    norms = _norms(parameters, table, norm_type)
    found = {
        f"grad_{norm_type}_norm{group_separator}{name}": norm
        for name, parameter, norm in zip(names, parameters, norms, strict=True)
        if parameter.grad is not None
    }
    if found:
        found[f"grad_{norm_type}_norm_total"] = torch.linalg.vector_norm(norms, norm_type)
    return found


def clip_gradients_norm(
    module: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    parameters: Iterable[Tensor] | None = None,
) -> Tensor:
    """Scale the gradients so that the norm of the original model's gradient is at most ``max_norm``.

    Collective as :func:`gradient_norm` is. Same as ``torch.nn.utils.clip_grad_norm_`` in one process.

    Args:
        module: a parallel model after a backward pass, or a module that holds one.
        max_norm: the greatest norm.
        norm_type: any positive number, or infinity.
        error_if_nonfinite: whether a norm that is not finite is an error.
        parameters: only these, such as an optimizer's; by default all of the module's.

    Returns:
        The norm before clipping, a scalar.

    Raises:
        ValueError: if ``norm_type`` is not positive.
        RuntimeError: if no parallel model is found; under ``error_if_nonfinite``, on every rank, if the norm is not
            finite.
    """
    chosen = list(module.parameters() if parameters is None else parameters)
    norm = gradient_norm(module, norm_type, parameters=chosen)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the gradients' norm of order {norm_type} is {norm.item()}: they cannot be clipped")
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients: dict[torch.device, list[Tensor]] = {}
    for parameter in chosen:
        if parameter.grad is not None:
            gradients.setdefault(parameter.grad.device, []).append(plain(parameter.grad))
    for device, found in gradients.items():
        foreach_multiply(found, scale.to(device))
    return norm


def clip_gradients_value(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clamp every element of the gradients to ``[-clip_value, clip_value]``. Not collective.

    Same as ``torch.nn.utils.clip_grad_value_``, also where FSDP2 has cut some of the parameters and not others.
    """
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            plain(parameter.grad).clamp_(-clip_value, clip_value)


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the original model.

    Collective over the model's tensor-parallel group; every rank gets the result.

    Args:
        model: a parallel model after a backward pass, or a module that holds one.

    Returns:
        Whole gradients on the CPU under every name of their parameter; parameters without a gradient are absent.

    Raises:
        RuntimeError: if no parallel model is found.
    """
    table = ParameterTable(model)
    group = table.group
    parameters = dict(model.named_parameters(remove_duplicate=False))
    present = gather_objects([n for n, p in parameters.items() if p.grad is not None], group.process_group)
    wanted = {name for names in present for name in names}

    def whole(parameter: nn.Parameter) -> Tensor:
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        gathered: Tensor = gather_to_cpu(gradient, table.meta(parameter), group)
        return gathered

    return each_once(((name, parameter) for name, parameter in parameters.items() if name in wanted), whole)


def _norms(parameters: Sequence[Tensor], table: ParameterTable, norm_type: float) -> Tensor:
    """The norms of the original model's gradients, ``[parameters]``, zero for those without one. Collective."""
    dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in parameters), torch.float32)
    spread = shard_group(*parameters)
    # What FSDP2 does not manage is in every copy of the model: the first one counts it.
    is_first_copy = spread is None or dist.get_rank(spread) == 0
    elements = [torch.empty(0, dtype=dtype, device=parameter.device) for parameter in parameters]
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None and (is_first_copy or is_cut(parameter)):
            blocks = counted_blocks(parameter, table.meta(parameter), table.group)
            elements[place] = counted_elements(plain(parameter.grad), blocks)
    groups = [table.group] if spread is None else [table.group, TPGroup.of(spread)]
    return whole_norms(elements, norm_type, dtype, groups)
