"""Traces a model, for what torch and transformers find out then and keep: ranks that are forked afterwards have it.

Only the process that they are forked from imports this: see ``distributed.PRELOADED``.
"""

from __future__ import annotations

import torch
from tiny import meta_model, token_batch

from lightning_autotp.capture.capture import capture

with torch.random.fork_rng():
    capture(meta_model("llama", num_hidden_layers=1), token_batch(0))
