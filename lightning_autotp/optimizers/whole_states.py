"""What optimizers remember of parameters that every rank has whole, and that must stay the same on all of them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autotp.optimizers.stepping import stepped_by
from lightning_autotp.optimizers.whole_matrices import WholeMatrixOptimizer
from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.parameters.state import parallel_state


def whole_states(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The states of parameters that are whole on every rank, by name.

    Only ordinary tensors of floating-point numbers: quantized states have classes of their own. None of an optimizer
    that steps whole matrices: each of its states is on one rank.

    Args:
        model: a parallel model.
        optimizer: any optimizer; other parameters in it are left out.
    """
    if isinstance(optimizer, WholeMatrixOptimizer):
        return
    places = parallel_state(model).places(model)
    names: dict[Tensor, str] = {place.parameter: place.name for place in places if not place.meta.is_parallel}
    for parameter in stepped_by(optimizer):
        for key, value in list(optimizer.state.get(parameter, {}).items()) if parameter in names else ():
            if type(value) in (Tensor, DTensor) and value.is_floating_point():
                yield f"{key} of {names[parameter]}", plain(value)
