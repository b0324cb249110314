"""What a model's own ``resize_token_embeddings`` makes of a copy of it.

The method knows which tensors and settings a class resizes, what it draws for new rows, and what it ties afterwards. So
it is not imitated: it runs on copies of the original model, in which only what it needs has values.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from lightning_autotp.capture.capture import meta_copy, on_meta

METHOD = "resize_token_embeddings"

Setting = tuple[str, tuple[str, ...]]
"""A module's path, and the attributes that lead from it to a value: its own, or those of its config."""


@dataclass(frozen=True)
class Asked:
    """A call of the method.

    Attributes:
        path: of the module whose method it is.
        arguments: by name.
    """

    path: str
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, original: nn.Module, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Asked:
        """A call as it is made.

        Raises:
            TypeError: if the method takes no such arguments.
        """
        signature = inspect.signature(getattr(original.get_submodule(path), METHOD))
        return cls(path, signature.bind(*args, **kwargs).arguments)

    def of_shapes(self, original: nn.Module) -> Resized:
        """Call it on a copy of the original model that is all on meta. No random number is drawn."""
        copy = meta_copy(original)
        before, tied, settings = tensors_of(copy), _aliases(copy), dict(_settings(copy))
        shapes = {name: tensor.shape for name, tensor in before.items()}
        drawn_simply = {"mean_resizing": False} if "mean_resizing" in self._names(copy) else {}
        self._call(copy, drawn_simply)
        after = tensors_of(copy)
        if after.keys() != before.keys() or _aliases(copy) != tied:
            raise RuntimeError(
                f"{METHOD} of {type(original).__name__} adds or removes tensors, or ties them otherwise than before:"
                " a divided model cannot follow. Call it while the model is whole, in configure_model() or before"
                " parallelize()"
            )
        new = {name for name in after if after[name] is not before[name] or after[name].shape != shapes[name]}
        now = dict(_settings(copy))
        changed = {where: value for where, value in now.items() if where not in settings or settings[where] != value}
        return Resized(copy, tuple(name for name in after if name in new), changed)

    def of_values(self, original: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call it on a copy of the original model in which some tensors have values.

        The generators must be in the state in which one process calls it: what is drawn is what it draws.

        Args:
            original: the model, on meta.
            given: whole tensors by their names in it, parameters or buffers, under all names of each.

        Returns:
            What the method puts in their places, by the same names.
        """
        known = {id(tensor): given[name] for name, tensor in tensors_of(original).items() if name in given}
        copy = meta_copy(original, lambda tensor: known[id(tensor)] if id(tensor) in known else on_meta(tensor))
        self._call(copy, {})
        after = tensors_of(copy)
        return {name: after[name] for name in given}

    def _names(self, model: nn.Module) -> Mapping[str, Any]:
        return inspect.signature(getattr(model.get_submodule(self.path), METHOD)).parameters

    def _call(self, model: nn.Module, instead: Mapping[str, Any]) -> None:
        getattr(model.get_submodule(self.path), METHOD)(**{**self.arguments, **instead})


@dataclass(frozen=True)
class Resized:
    """The original model after the call, without values.

    Attributes:
        model: it, on meta.
        tensors: the names of parameters and buffers that are others than before.
        settings: integers and the like that modules and configs have now and had not before.
    """

    model: nn.Module
    tensors: tuple[str, ...]
    settings: Mapping[Setting, Any]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by all their names."""
        return {name: tuple(tensor.shape) for name, tensor in tensors_of(self.model).items()}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def set_settings(modules: Mapping[str, nn.Module], settings: Mapping[Setting, Any]) -> None:
    """Give modules, by their paths in the original model, what the modules at these paths there have now."""
    for (path, (*way, name)), value in settings.items():
        owner: Any = modules[path]
        for attribute in way:
            owner = getattr(owner, attribute)
        setattr(owner, name, value)


def _aliases(model: nn.Module) -> set[frozenset[str]]:
    """Which names are one tensor's."""
    names: dict[int, set[str]] = {}
    for name, tensor in tensors_of(model).items():
        names.setdefault(id(tensor), set()).add(name)
    return set(map(frozenset, names.values()))


def _settings(model: nn.Module) -> Iterator[tuple[Setting, Any]]:
    """Plain values that modules have, and those in their configs."""
    for path, module in model.named_modules():
        for way, value in _plain(vars(module), ()):
            if way != ("training",):
                yield (path, way), value


def _plain(values: Mapping[str, Any], way: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if value is None or isinstance(value, bool | int | float | str):
            yield (*way, name), value
        elif isinstance(value, PreTrainedConfig):
            yield from _plain(vars(value), (*way, name))
