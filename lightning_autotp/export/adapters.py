"""PEFT's adapters on a parallel model: saving them in PEFT's own format.

To everything else an adapter is just more layers of the model: they are traced, planned, cut and loaded like others.
Only what PEFT does with weights outside a forward has to know that a rank has parts of them. PEFT itself decides which
tensors belong to an adapter and what they are called in its files; this module gives it whole tensors in the place of
this rank's. PEFT is imported only by who uses it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_autotp.parameters.gathering import gather_to_cpu
from lightning_autotp.parameters.state import ParameterTable
from lightning_autotp.ranks.agreement import raise_together

if TYPE_CHECKING:
    from peft import PeftModel


def find_adapted(module: nn.Module) -> PeftModel | None:
    """The first PEFT model that ``module`` is or holds, ``None`` without one (or without PEFT)."""
    peft = sys.modules.get("peft")  # if it was not imported, no model was made with it
    if peft is None:
        return None
    return next((child for child in module.modules() if isinstance(child, peft.PeftModel)), None)


def save_adapter(
    model: PeftModel,
    directory: str | os.PathLike[str],
    *,
    write: bool = True,
    every_process: bool = False,
    **kwargs: Any,
) -> None:
    """Write the adapters of a parallel model so that ``PeftModel.from_pretrained(base, directory)`` loads them.

    Collective over the model's tensor-parallel group, whose rank 0 writes. Only the adapters' tensors are gathered, and
    those that PEFT saves with them (``modules_to_save``, resized embeddings).

    Args:
        model: the ``peft.PeftModel`` around (or inside) the parallel model.
        directory: where to; it is made. Adapters of other names than ``"default"`` get directories of their own in it.
        write: whether rank 0 of this group writes at all (with several data-parallel groups only one should).
        every_process: whether every process calls this and not only the model's group: an error then reaches all.
        **kwargs: for ``peft.PeftModel.save_pretrained``, such as ``selected_adapters``.

    Raises:
        TypeError: if the model is not a ``PeftModel``.
        PeerError: if rank 0 could not write, on the other ranks.
    """
    if find_adapted(model) is not model:
        raise TypeError(
            f"save_adapter writes the adapters of a PeftModel, not of a {type(model).__name__}: pass what"
            " get_peft_model() returned"
        )
    table = ParameterTable(model)
    group = table.group
    writes = write and group.rank == 0
    whole: dict[str, Tensor] = {}
    for name, value in _of_adapters(model, kwargs).items():
        gathered = gather_to_cpu(value, table.meta(value), group, writes)
        if writes:
            whole[name] = gathered
    with raise_together(None if every_process else group.process_group, f"writing the adapter to {directory}"):
        if writes:
            with _of_its_own_class(model.get_base_model()):
                model.save_pretrained(os.fspath(directory), state_dict=whole, **kwargs)


@contextmanager
def _of_its_own_class(module: nn.Module) -> Iterator[None]:
    """Within it a module is of the class that it had before FSDP2 made one of it: PEFT writes what it is called."""
    kind = type(module)
    bases = (one for one in kind.__mro__ if issubclass(one, nn.Module) and not issubclass(one, FSDPModule))
    module.__class__ = next(bases)
    try:
        yield
    finally:
        module.__class__ = kind


def _of_adapters(model: PeftModel, options: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's part of every tensor that PEFT would save, by the names they have in the model."""
    from peft import get_peft_model_state_dict

    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    saved = [
        value
        for adapter in options.get("selected_adapters") or list(model.peft_config)
        for value in get_peft_model_state_dict(
            model,
            state_dict=dict(state),
            adapter_name=adapter,
            save_embedding_layers=options.get("save_embedding_layers", "auto"),
        ).values()
    ]
    ours = {id(value) for value in state.values()}
    wanted = {id(value) for value in saved}
    # A method that saves what it computes from its tensors gets them all.
    return {name: value for name, value in state.items() if id(value) in wanted or not wanted <= ours}
