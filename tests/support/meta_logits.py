"""Vocabulary-parallel logits without values."""

from __future__ import annotations

import torch

from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel import TPGroup, VocabParallelLogits

VOCAB = 7


def on_meta() -> VocabParallelLogits:
    return VocabParallelLogits(
        torch.empty(2, 5, 4, device="meta"), Shard(((2, Ownership.even(VOCAB, 2)),)), TPGroup("", 0, 2)
    )
