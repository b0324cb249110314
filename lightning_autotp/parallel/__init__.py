"""What runs in a parallel model: layers with local parameters, the collectives between them, and sharded logits."""

from lightning_autotp.parallel.collectives import (
    all_gather,
    all_gather_replicate,
    all_reduce,
    all_reduce_replicate,
    convert,
    copy_to_tensor_parallel,
    reduce_scatter,
    scatter,
)
from lightning_autotp.parallel.cross_entropy import VocabParallelCrossEntropyLoss, vocab_parallel_cross_entropy
from lightning_autotp.parallel.embedding import VocabParallelEmbedding, vocab_parallel_lookup
from lightning_autotp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_autotp.parallel.local_parameters import localize_parameter
from lightning_autotp.parallel.logits import VocabParallelLogits
from lightning_autotp.ranks.group import TPGroup

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TPGroup",
    "VocabParallelCrossEntropyLoss",
    "VocabParallelEmbedding",
    "VocabParallelLogits",
    "all_gather",
    "all_gather_replicate",
    "all_reduce",
    "all_reduce_replicate",
    "convert",
    "copy_to_tensor_parallel",
    "localize_parameter",
    "reduce_scatter",
    "scatter",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_lookup",
]
