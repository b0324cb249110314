"""Tensor parallelism for any PyTorch model, planned from its own graph.

Importing it registers ``strategy="autotp"`` for Lightning's Trainer and for Fabric. Its modules, and the libraries that
they need, are imported when they are used.
"""
# ruff: noqa: F401  (what type checkers see)

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_autotp.lightning.registration import register_with_lightning

if TYPE_CHECKING:
    from lightning_autotp import losses, metrics
    from lightning_autotp.applying.followed_code import UnseenPath
    from lightning_autotp.building.checkpoint_reading import CheckpointError
    from lightning_autotp.capture.capture import CaptureError
    from lightning_autotp.checkpoints.state import full_state_dict, load_full_state_dict
    from lightning_autotp.export.adapters import save_adapter
    from lightning_autotp.export.from_checkpoint import export_checkpoint
    from lightning_autotp.export.from_model import save_pretrained
    from lightning_autotp.gradients.norms import clip_gradients_norm, full_gradients, grad_norms
    from lightning_autotp.gradients.penalties import penalty
    from lightning_autotp.gradients.whole_parameters import full_tensor
    from lightning_autotp.guard.checked import UnsoundUse, checked
    from lightning_autotp.hf_trainer import AutoTPTrainerMixin
    from lightning_autotp.layouts.plan import Plan
    from lightning_autotp.lightning.averaging import EMAWeightAveraging, WeightAveraging
    from lightning_autotp.lightning.fabric import AutoTPFabricStrategy
    from lightning_autotp.lightning.strategy import AutoTPStrategy
    from lightning_autotp.lightning.summary import ParallelSummary
    from lightning_autotp.operators.declared import declare
    from lightning_autotp.operators.notation import DeclarationError
    from lightning_autotp.pipeline import make_plan, parallelize
    from lightning_autotp.planning.recommend import recommend
    from lightning_autotp.pretrained.meta_model import meta_model
    from lightning_autotp.proving.compare import VerificationError
    from lightning_autotp.proving.new_calls import UnprovedCall
    from lightning_autotp.ranks.agreement import PeerError
    from lightning_autotp.solving.cost import Profile
    from lightning_autotp.solving.planned import PlanMismatch
    from lightning_autotp.solving.solver import NothingToShard
    from lightning_autotp.whole_matrices.optimizer import WholeMatrixOptimizer

_NAMES = {
    "applying.followed_code": ["UnseenPath"],
    "building.checkpoint_reading": ["CheckpointError"],
    "pretrained.meta_model": ["meta_model"],
    "capture.capture": ["CaptureError"],
    "export.adapters": ["save_adapter"],
    "export.from_model": ["save_pretrained"],
    "export.from_checkpoint": ["export_checkpoint"],
    "checkpoints.state": ["full_state_dict", "load_full_state_dict"],
    "gradients.norms": ["clip_gradients_norm", "full_gradients", "grad_norms"],
    "gradients.penalties": ["penalty"],
    "gradients.whole_parameters": ["full_tensor"],
    "guard.checked": ["UnsoundUse", "checked"],
    "hf_trainer": ["AutoTPTrainerMixin"],
    "layouts.plan": ["Plan"],
    "lightning.averaging": ["EMAWeightAveraging", "WeightAveraging"],
    "lightning.fabric": ["AutoTPFabricStrategy"],
    "lightning.strategy": ["AutoTPStrategy"],
    "lightning.summary": ["ParallelSummary"],
    "operators.declared": ["declare"],
    "operators.notation": ["DeclarationError"],
    "whole_matrices.optimizer": ["WholeMatrixOptimizer"],
    "pipeline": ["make_plan", "parallelize"],
    "planning.recommend": ["recommend"],
    "proving.compare": ["VerificationError"],
    "proving.new_calls": ["UnprovedCall"],
    "ranks.agreement": ["PeerError"],
    "solving.cost": ["Profile"],
    "solving.planned": ["PlanMismatch"],
    "solving.solver": ["NothingToShard"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted([*_MODULES, "losses", "metrics"])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _MODULES:
        return import_module(f"{__name__}.{name}")  # which sets it here
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_lightning()
