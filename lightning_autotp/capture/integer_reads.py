"""Which integers the code of each module reads: one of them may be a size that must become local."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from torch import nn

from lightning_autotp.parameters.subclassing import subclass


def note_integers(model: nn.Module, running: Callable[[], str]) -> dict[str, dict[str, int]]:
    """Have a model note which integers its code reads; it is a copy, and is not used for anything else.

    Args:
        model: the module tree, whose modules and configs get classes that note what is read of them.
        running: tells the path of the module that runs.

    Returns:
        By module, what has been read so far: integer attributes of its own, and as ``config.NAME`` those of its config.
    """
    reads: dict[str, dict[str, int]] = {}
    modules = dict(model.named_modules())
    configs = {path: vars(module).get("config") for path, module in modules.items()}

    def watch_module(path: str, module: nn.Module) -> None:
        _watch(module, lambda name, value: reads.setdefault(path, {}).setdefault(name, value))

    def watch_config(config: object) -> None:
        names = getattr(config, "attribute_map", {})

        def note(name: str, value: int) -> None:
            path = running()
            if configs.get(path) is config:
                reads.setdefault(path, {}).setdefault(f"config.{names.get(name, name)}", value)

        _watch(config, note)

    for config in {id(config): config for config in configs.values() if config is not None}.values():
        watch_config(config)
    for path, module in modules.items():
        watch_module(path, module)
    return reads


def _watch(target: object, note: Callable[[str, int], object]) -> None:
    """Report every integer attribute read of ``target`` (the object itself, not its class)."""
    kind = type(target)

    def read(self: object, name: str) -> object:
        value = kind.__getattribute__(self, name)
        if type(value) is int and name in kind.__getattribute__(self, "__dict__"):
            note(name, value)
        return value

    known_as = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}  # its code may look itself up by name
    watched = subclass(kind.__name__, (kind,), {"__getattribute__": read, **known_as})
    with suppress(TypeError):  # a dict, say, whose class cannot be changed: it has no attributes either
        target.__class__ = watched
