"""Rules: how each operator's dims are tied together, by family. Importing this package registers them all."""

from lightning_autotp.operators import (
    attention,
    convolution,
    creation,
    indexing,
    loss,
    matmul,
    normalisation,
    pointwise,
    reduction,
    views,
    writing,
)
from lightning_autotp.operators.registry import Dims, Relation, Site, entry, known_operators, relate, rule

__all__ = [
    "Dims",
    "Relation",
    "Site",
    "attention",
    "convolution",
    "creation",
    "entry",
    "indexing",
    "known_operators",
    "loss",
    "matmul",
    "normalisation",
    "pointwise",
    "reduction",
    "relate",
    "rule",
    "views",
    "writing",
]
