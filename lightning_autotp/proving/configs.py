"""Settings that a model reads from its config: noticed when they change, and kept alike in all copies of the config.

Modules that keep a size of theirs in a config have a copy of it with this rank's size. What a user sets in the model's
own config afterwards must reach these copies, as in the original model, where they all are one object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_autotp.layouts.plan import SizePlan


@dataclass
class _Config:
    """One config of the original model.

    Attributes:
        watched: the object that the local model's user sees.
        copies: the other objects that stand for it, each with the names of what it has a value of its own for.
        last: the settings when they were looked at last.
    """

    watched: Any
    copies: list[tuple[Any, frozenset[str]]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)


class ConfigWatch:
    """The configs of a parallel model.

    Args:
        here: the local model's modules, by the paths that they have in the original one.
        original: a copy of the original model.
        sizes: the plan's sizes, some of which are entries of configs.
    """

    def __init__(self, here: Mapping[str, nn.Module], original: nn.Module, sizes: Iterable[SizePlan]) -> None:
        own: dict[tuple[str, str], set[str]] = {}
        for size in sizes:
            head, _, name = size.attribute.rpartition(".")
            if head:
                own.setdefault((size.module, head), set()).add(name)
        found: dict[int, _Config] = {}
        for path, attribute, config in _configs(original):
            ours = getattr(here[path], attribute, None)
            if ours is None:
                continue
            entry = found.setdefault(id(config), _Config(ours, [(config, frozenset())]))
            entry.copies.append((ours, frozenset(own.get((path, attribute), ()))))
        self._configs = list(found.values())
        for entry in self._configs:
            distinct = {id(copy): (copy, kept) for copy, kept in entry.copies if copy is not entry.watched}
            entry.copies, entry.last = list(distinct.values()), dict(vars(entry.watched))
        self._version = 0
        self._seen = [[entry.last for entry in self._configs]]

    def version(self) -> int:
        """The number of the settings as they are now: equal ones have the same. Changes are brought to the copies.

        It takes a few microseconds where nothing has changed.
        """
        if all(vars(entry.watched) == entry.last for entry in self._configs):
            return self._version
        for entry in self._configs:
            now, last = dict(vars(entry.watched)), entry.last
            changed = {name: value for name, value in now.items() if name not in last or last[name] != value}
            for copy, kept in entry.copies:
                vars(copy).update({name: value for name, value in changed.items() if name not in kept})
            entry.last = now
        settings = [entry.last for entry in self._configs]
        if settings not in self._seen:
            self._seen.append(settings)
        self._version = self._seen.index(settings)
        return self._version


def _configs(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Objects that modules have and that hold nothing but settings: their module's path, attribute, and the object."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            settings = getattr(value, "__dict__", None)
            if attribute.startswith("_") or callable(value) or not isinstance(settings, dict) or not settings:
                continue
            if isinstance(value, nn.Module | Tensor) or any(map(_is_no_setting, settings.values())):
                continue
            yield path, attribute, value


def _is_no_setting(value: Any) -> bool:
    return isinstance(value, Tensor | nn.Module) or hasattr(value, "__array__")
