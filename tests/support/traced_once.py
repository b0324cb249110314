"""Plans for the model that most tests train, for what torch and transformers find out then and keep: ranks that are
forked afterwards have it, and what operators give for its sizes.

Only the process that they are forked from imports this: see ``distributed.PRELOADED``.
"""

from __future__ import annotations

import torch
from training import BLOCKS, tiny_config
from transformers import AutoModelForCausalLM

from lightning_autotp import make_plan
from lightning_autotp.capture.capture import as_call, capture, in_small

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(tiny_config())
batch = {"input_ids": BLOCKS[:4], "labels": BLOCKS[:4]}
with torch.random.fork_rng():
    make_plan(model, 2, example_inputs=in_small(model, as_call(batch)))
    capture(model, batch)
