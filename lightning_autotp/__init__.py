"""Tensor parallelism for any PyTorch model, planned from its own graph.

Importing it registers ``strategy="autotp"`` for Lightning's Trainer and for Fabric.
"""

from lightning_autotp import losses, metrics
from lightning_autotp.applying.seen_paths import UnseenPath
from lightning_autotp.building.checkpoint_reading import CheckpointError
from lightning_autotp.building.pretrained import meta_model
from lightning_autotp.capture.capture import CaptureError
from lightning_autotp.checkpoints.export import save_pretrained
from lightning_autotp.checkpoints.export_checkpoint import export_checkpoint
from lightning_autotp.checkpoints.state import full_state_dict, load_full_state_dict
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.lightning.averaging import EMAWeightAveraging, WeightAveraging
from lightning_autotp.lightning.fabric import AutoTPFabricStrategy
from lightning_autotp.lightning.strategy import AutoTPStrategy
from lightning_autotp.lightning.summary import ParallelSummary
from lightning_autotp.pipeline import make_plan, parallelize
from lightning_autotp.proving.compare import VerificationError
from lightning_autotp.proving.new_calls import UnprovedCall
from lightning_autotp.ranks.agreement import PeerError
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.planned import PlanMismatch
from lightning_autotp.solving.solver import NothingToShard
from lightning_autotp.training.adapters import save_adapter
from lightning_autotp.training.checked import UnsoundUse, checked
from lightning_autotp.training.gradients import clip_gradients_norm, full_gradients, grad_norms
from lightning_autotp.training.penalties import penalty
from lightning_autotp.training.whole_matrices import WholeMatrixOptimizer
from lightning_autotp.training.whole_parameters import full_tensor

__all__ = [
    "AutoTPFabricStrategy",
    "AutoTPStrategy",
    "CaptureError",
    "CheckpointError",
    "EMAWeightAveraging",
    "NothingToShard",
    "ParallelSummary",
    "PeerError",
    "Plan",
    "PlanMismatch",
    "Profile",
    "UnprovedCall",
    "UnseenPath",
    "UnsoundUse",
    "VerificationError",
    "WeightAveraging",
    "WholeMatrixOptimizer",
    "checked",
    "clip_gradients_norm",
    "export_checkpoint",
    "full_gradients",
    "full_state_dict",
    "full_tensor",
    "grad_norms",
    "load_full_state_dict",
    "losses",
    "make_plan",
    "meta_model",
    "metrics",
    "parallelize",
    "penalty",
    "save_adapter",
    "save_pretrained",
]
