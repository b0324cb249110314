"""The name ``"autotp"``, known to Lightning as soon as there is Lightning.

Importing Lightning takes seconds, and who divides a model in a loop of their own, or asks the command for its help,
does not need it. So where it has not been imported yet, the name is registered when it is.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

STRATEGIES = "lightning.pytorch.strategies"
"""The module that has the Trainer's names of strategies; Fabric's are imported before it."""


def register_with_lightning() -> None:
    """Register ``"autotp"`` now, or when Lightning is imported."""
    if STRATEGIES in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder, Loader):
    """Sees Lightning's strategies being imported once, and then is gone."""

    _loader: Any

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register()


def _register() -> None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    about = "Tensor parallelism for any model, planned from its own graph"
    StrategyRegistry.register("autotp", _trainer_strategy, description=about, override=True)
    STRATEGY_REGISTRY.register("autotp", _fabric_strategy, description=about, override=True)


def _trainer_strategy() -> Any:
    from lightning_autotp.lightning.strategy import AutoTPStrategy

    return AutoTPStrategy()


def _fabric_strategy() -> Any:
    from lightning_autotp.lightning.fabric import AutoTPFabricStrategy

    return AutoTPFabricStrategy()
