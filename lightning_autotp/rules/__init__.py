"""Rules: how each operator's dims are tied together, by family. Importing this package registers them all."""

from lightning_autotp.rules import attention, indexing, loss, matmul, pointwise, reduction, views
from lightning_autotp.rules.registry import Dims, Relation, Site, entry, known_operators, relate, rule

__all__ = [
    "Dims",
    "Relation",
    "Site",
    "attention",
    "entry",
    "indexing",
    "known_operators",
    "loss",
    "matmul",
    "pointwise",
    "reduction",
    "relate",
    "rule",
    "views",
]
