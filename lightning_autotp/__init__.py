"""Tensor parallelism for any PyTorch model, planned from its own graph.

Importing it registers Lightning's ``strategy="autotp"``.
"""

from lightning_autotp.agreement import PeerError
from lightning_autotp.capture import CaptureError
from lightning_autotp.checkpoint import full_state_dict, load_full_state_dict, save_pretrained
from lightning_autotp.gradients import full_gradients
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
    "full_gradients",
    "full_state_dict",
    "load_full_state_dict",
    "make_plan",
    "meta_model",
    "parallelize",
    "save_pretrained",
]
