"""What this program can do in parallel: every parallel implementation, each declared beside what it runs."""

from __future__ import annotations

from lightning_autotp.parallel.cross_entropy import VOCAB_CROSS_ENTROPY
from lightning_autotp.parallel.embedding import VOCAB
from lightning_autotp.parallel.experts import WHOLE_EXPERTS
from lightning_autotp.parallel.kernel_losses import VOCAB_KERNEL_LINEAR_LOSS, VOCAB_KERNEL_LOSS
from lightning_autotp.parallel.linear import COLUMN, ROW
from lightning_autotp.parallel.mean import MEAN
from lightning_autotp.solving.implementations import Implementations

IMPLEMENTATIONS = Implementations(
    COLUMN, ROW, VOCAB, VOCAB_CROSS_ENTROPY, VOCAB_KERNEL_LOSS, VOCAB_KERNEL_LINEAR_LOSS, MEAN, WHOLE_EXPERTS
)
"""The list that the pipeline gives to the solver."""
