"""Optimizers of parallel models, for both strategies: they are checked, and moved to local parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autotp.checkpoints.state import load_full_optimizer_state
from lightning_autotp.guard.guard import check_gradients
from lightning_autotp.guard.on_parts import check_optimizer
from lightning_autotp.optimizers.stepping import stepped_by
from lightning_autotp.parallel.head_product import compute_undone
from lightning_autotp.ranks.agreement import raise_together


class CheckedOptimizers:
    """Refuses optimizers that cannot work on parts of tensors, and looks again when they have got other groups."""

    def __init__(self) -> None:
        self._groups: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def check(self, optimizers: Sequence[tuple[Optimizer, nn.Module]]) -> None:
        """Check these, each with the module that has its parameters, if one is not as it was. Collective then.

        What any other optimizer is does not count: it may be garbage on one rank and not yet on another.

        Raises:
            ValueError: for an optimizer that treats this rank's part of a tensor as a whole one; PeerError elsewhere.
        """
        groups = {optimizer: len(optimizer.param_groups) for optimizer, _ in optimizers}
        if any(self._groups.get(optimizer) != count for optimizer, count in groups.items()):
            with raise_together(None, "checking the optimizers"), isolate_rng():
                for optimizer, module in optimizers:
                    check_optimizer(optimizer, module)
            self._groups.update(groups)

    def forget(self) -> None:
        """Check all of them the next time."""
        self._groups.clear()


def then_compute(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """An optimizer's closure, and after it what has to be done before the optimizer writes into the weights.

    Logits that were put off are computed, as something may look at them after the step, and gradients are checked.
    """

    def compute() -> Any:
        result = closure()
        compute_undone()
        check_gradients(optimizer)
        return result

    return compute


class Original(NamedTuple):
    """An optimizer of a model that is still whole.

    Attributes:
        optimizer: the optimizer.
        names: of its groups' parameters in the model; ``None`` for those that are not in it.
        state: its state dict, of whole tensors, if it has a state.
    """

    optimizer: Optimizer
    names: list[list[str | None]]
    state: Mapping[str, Any] | None


def originals(optimizers: Sequence[Optimizer], module: nn.Module) -> list[Original]:
    """What to know of optimizers before their model is made local, for :func:`move_to_local`. Not collective.

    Raises:
        ValueError: for an optimizer without a parameter of the model, or with a state on the meta device.
    """
    names = {parameter: name for name, parameter in reversed(list(module.named_parameters(remove_duplicate=False)))}
    found = []
    for number, optimizer in enumerate(optimizers):
        named = [[names.get(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        kind = f"optimizer {number}, {type(optimizer).__name__},"
        if not any(name for group in named for name in group):
            raise ValueError(
                f"{kind} has no parameter of {type(module).__name__}: make it with the parameters of the model that it"
                " is given to fabric.setup with, before that call; or after fabric.setup_module(model), with"
                " model.parameters(), for fabric.setup_optimizers"
            )
        tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        if any(value.is_meta for value in tensors):
            raise ValueError(
                f"{kind} has made its state already, of parameters that have no values yet: make it after"
                " model = fabric.setup_module(model), and give it to fabric.setup_optimizers"
            )
        found.append(Original(optimizer, named, optimizer.state_dict() if optimizer.state else None))
    return found


def move_to_local(original: Original, module: nn.Module) -> None:
    """Let an optimizer hold the local parameters in place of the whole ones, in its groups, with its state.

    Not collective. Parameters of others stay.

    Args:
        original: the optimizer as it was.
        module: the model, which is parallel now, with the same names.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    optimizer = original.optimizer
    for group, names in zip(optimizer.param_groups, original.names, strict=True):
        group["params"][:] = [
            before if name is None else parameters[name] for before, name in zip(group["params"], names, strict=True)
        ]
    if original.state is not None:
        optimizer.state.clear()
        load_full_optimizer_state(optimizer, original.state, module)


def owner_of(optimizer: Optimizer, modules: Sequence[nn.Module]) -> nn.Module | None:
    """The module that has an optimizer's parameters, a list of several, or ``None`` where none is in any.

    Raises:
        ValueError: for parameters that a model had before it was made local.
    """
    parameters = list(stepped_by(optimizer))
    having = [(module, set(module.parameters())) for module in modules]
    for parameter in parameters:
        before = vars(parameter).get("autotp_owner")
        if before is not None and not any(parameter in own for _, own in having):
            raise ValueError(
                f"{type(optimizer).__name__} has parameters that the {before} had before it was set up, and that are in"
                " no model any more: make it with the parameters of what fabric.setup_module returned, or give it to"
                " fabric.setup together with the model"
            )
    found = [module for module, own in having if any(parameter in own for parameter in parameters)]
    return nn.ModuleList(found) if len(found) > 1 else next(iter(found), None)
