"""Tensor parallelism for any PyTorch model, planned from its own graph.

Importing it registers Lightning's ``strategy="autotp"``.
"""

from lightning_autotp import metrics
from lightning_autotp.agreement import PeerError
from lightning_autotp.capture import CaptureError
from lightning_autotp.checkpoint import full_state_dict, load_full_state_dict
from lightning_autotp.export import save_pretrained
from lightning_autotp.export_checkpoint import export_checkpoint
from lightning_autotp.gradients import full_gradients, grad_norms
from lightning_autotp.load import CheckpointError
from lightning_autotp.pipeline import make_plan, parallelize
from lightning_autotp.plan import Plan
from lightning_autotp.pretrained import meta_model
from lightning_autotp.solver import NothingToShard
from lightning_autotp.strategy import AutoTPStrategy
from lightning_autotp.verify import VerificationError

__all__ = [
    "AutoTPStrategy",
    "CaptureError",
    "CheckpointError",
    "NothingToShard",
    "PeerError",
    "Plan",
    "VerificationError",
    "export_checkpoint",
    "full_gradients",
    "full_state_dict",
    "grad_norms",
    "load_full_state_dict",
    "make_plan",
    "meta_model",
    "metrics",
    "parallelize",
    "save_pretrained",
]
