"""Parameters that a caller chooses, as objects or by name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from torch import Tensor, nn


def parameter_names(module: nn.Module, parameters: Iterable[Tensor | str]) -> list[str]:
    """The names that parameters have in a module: one name for each, the first, also of tied ones. Not collective.

    To be asked before anything else: where FSDP2 manages a parameter, other objects take its place from step to step.

    Args:
        module: any module.
        parameters: parameters of it as they are now, or any of their names in it.

    Raises:
        ValueError: for what is not a parameter of the module.
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found[name] = first.setdefault(id(parameter), name)
    names: dict[str, None] = {}
    for chosen in parameters:
        known = found.get(chosen) if isinstance(chosen, str) else first.get(id(chosen))
        if known is None:
            raise ValueError(_unknown(module, chosen, found))
        names[known] = None
    return list(names)


def _unknown(module: nn.Module, chosen: Tensor | str, names: Iterable[str]) -> str:
    if isinstance(chosen, str):
        alike = get_close_matches(chosen, names, n=1)
        hint = f"; did you mean {alike[0]!r}?" if alike else ", where names are those of its named_parameters()"
        return f"{chosen!r} is not a parameter of {type(module).__name__}{hint}"
    return (
        f"a tensor of shape {tuple(chosen.shape)} is not a parameter of {type(module).__name__}: pass a parameter"
        " itself, not a view or a copy of it, and the module that has it; or pass its name"
    )
