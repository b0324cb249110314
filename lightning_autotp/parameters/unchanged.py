"""Whether the modules and parameters of a parallel model are those for which the plan was proved.

A model is not told that a layer of it was replaced, that its embeddings were resized or untied. Some changes are
right: libraries put parameters in the places of others (FSDP2, ``module.to(...)``, copies) and modules around others
(compilers, adapters' wrappers).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_autotp.parameters.forwards import other_forwards
from lightning_autotp.parameters.local_blocks import fsdp_modules
from lightning_autotp.parameters.state import (
    ParallelState,
    ParameterPlace,
    dotted,
    misfits,
    own_modules,
    parallel_state,
    refuse_changes,
)


def check_unchanged(model: nn.Module) -> list[ParameterPlace]:
    """Look at all of a parallel model. Not collective.

    Returns:
        Where its parameters are now.

    Raises:
        RuntimeError: naming modules that are gone, have moved or were replaced, or whose ``forward`` was; or parameters
            of which nothing is known, that are gone, of another shape than this rank's part, or tied otherwise than
            before.
    """
    state, modules = parallel_state(model), dict(own_modules(model))
    refuse_changes(model, [*_other_modules(model, modules, state), *other_forwards(model, modules, state)])
    places = state.places(model)
    here = {place.name for place in places}
    gone = [name for name in state.metas if name not in here and name.rpartition(".")[0] in state.modules]
    refuse_changes(model, [f"{name} is gone" for name in gone] + misfits(places))
    if fsdp_modules(model):
        given = [place.name for place in places if not isinstance(place.parameter, nn.Parameter)]
        refuse_changes(model, [f"{name} was given for one call, and FSDP2 would use its own" for name in given])
    return places


def _other_modules(model: nn.Module, modules: dict[str, nn.Module], state: ParallelState) -> Iterator[str]:
    """Modules that are not where they were when the model was divided. Others may have been put around them."""
    before = {path: state.path(module) if module is not model else "" for path, module in modules.items()}
    places: dict[str, str] = {}  # where a module is but for what was put around it
    for path in modules:
        above, _, name = path.rpartition(".")
        places[path] = dotted(places[above], name) if path and before[above] is not None else places.get(above, "")
        was = before[path]
        if was not in (None, places[path]):
            yield f"{was} is at {path} now"
            places[path] = was
    gone = set(state.modules) - set(before.values())
    taken = {places[path]: modules[path] for path in reversed(modules) if before[path] is None}
    for path in sorted(gone):
        if path.rpartition(".")[0] not in gone:
            other = taken.get(path)
            yield f"{path} is gone" if other is None else f"{path} was replaced by another module, a {_kind(other)}"


def _kind(module: nn.Module) -> str:
    return type(module).__name__
