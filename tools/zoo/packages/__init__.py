"""Models of other packages than transformers, and of torch itself: a file for each, with its models and their batches.

Where a package is not installed, its group is unknown: nothing here is imported before its group is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module

from zoo.packages.entry import Entry


@dataclass(frozen=True)
class Package:
    """Where a group's models stand.

    Attributes:
        title: what the page calls them.
        module: the file of this folder; its ``MODELS`` are the group.
        distribution: what is to be installed for them.
    """

    title: str
    module: str
    distribution: str


PACKAGES: dict[str, Package] = {
    "torch": Package("torch.nn", "torch_nn", "torch"),
    "diffusers": Package("diffusers", "of_diffusers", "diffusers"),
    "timm": Package("timm", "of_timm", "timm"),
    "torchvision": Package("torchvision", "of_torchvision", "torchvision"),
    "x-transformers": Package("x-transformers", "of_x_transformers", "x-transformers"),
    "litgpt": Package("LitGPT", "of_litgpt", "litgpt"),
}


@cache
def entries(group: str) -> dict[str, Entry]:
    """A package's models by name, in the order of its file."""
    return {entry.name: entry for entry in import_module(f"zoo.packages.{PACKAGES[group].module}").MODELS}
