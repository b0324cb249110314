"""What a user pins of a plan: parameters, and random numbers, that stay whole, parameters that are cut along a dim."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from lightning_autotp.operators import relate
from lightning_autotp.operators.graph import Graph


def pinned(
    parameters: Sequence[Sequence[str]],
    keep_whole: Iterable[str] = (),
    cut: Mapping[str, int] | None = None,
    modules: Iterable[str] = (),
) -> dict[str, int | None]:
    """The parameters that patterns mean.

    Args:
        parameters: every parameter's names.
        keep_whole: patterns (``*`` and ``?`` as in file names) of parameters' or modules' names: these parameters, and
            those in these modules, stay whole on every rank.
        cut: the dim along which the parameters of a name or pattern are cut.
        modules: paths of modules that may be kept whole, also if there are no parameters in them.

    Returns:
        By a parameter's first name its dim; ``None`` for one that stays whole.

    Raises:
        ValueError: if a pattern matches nothing, or two of them contradict each other.
    """
    found: dict[str, int | None] = {}
    by: dict[str, str] = {}
    paths = list(modules)
    wishes: list[tuple[str, int | None, str]] = [(pattern, None, "keep_whole") for pattern in keep_whole]
    wishes += [(pattern, dim, "cut") for pattern, dim in (cut or {}).items()]
    for pattern, dim, option in wishes:
        is_module = dim is None and any(_matches(path, pattern) for path in paths)
        for name in meant(pattern, parameters, option, may_be_none=is_module):
            if name in found and found[name] != dim:
                raise ValueError(
                    f"{option}={pattern!r} contradicts {by[name]} about {name}: it cannot be {_text(dim)} and"
                    f" {_text(found[name])}"
                )
            found[name], by[name] = dim, f"{option}={pattern!r}"
    return found


def kept_draws(graph: Graph, keep_whole: Collection[str]) -> dict[int, str]:
    """Positions of operators that draw random numbers, in modules that are kept whole, and why nothing is cut there."""
    if not keep_whole:
        return {}
    drawing = {id(relation.operator) for relation in relate(graph)[0] if relation.draws}
    return {
        position: "its random numbers are to be those of one process, as keep_whole= says"
        for position, operator in enumerate(graph.operators)
        if id(operator) in drawing and any(_matches(operator.module, pattern) for pattern in keep_whole)
    }


def meant(pattern: str, parameters: Sequence[Sequence[str]], option: str, *, may_be_none: bool = False) -> list[str]:
    """The first names of the parameters that a pattern means.

    Args:
        pattern: a parameter's or module's name, or a pattern of them.
        parameters: every parameter's names.
        option: what the pattern was given as.
        may_be_none: whether it may match nothing.

    Raises:
        ValueError: if it matches nothing.
    """
    matched = [names[0] for names in parameters if any(_matches(name, pattern) for name in names)]
    if not matched and not may_be_none:
        raise ValueError(f"{option}: no parameter or module is called {pattern!r}{_alike(pattern, parameters)}")
    return matched


def _matches(name: str, pattern: str) -> bool:
    """Whether a parameter's name, or the path of a module it is in, matches."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _alike(pattern: str, parameters: Sequence[Sequence[str]]) -> str:
    """Names that a pattern may have meant."""
    names = [name for aliases in parameters for name in aliases]
    paths = dict.fromkeys([*names, *(name.rpartition(".")[0] for name in names)])
    close = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.4)
    return f"; did you mean {', '.join(close)}?" if close else ""


def _text(dim: int | None) -> str:
    return "kept whole" if dim is None else f"cut along dim {dim}"
