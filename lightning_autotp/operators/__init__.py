"""One record for every operator, by family. Importing this package declares them all."""

from lightning_autotp.operators import (  # noqa: F401  # which enter their records
    attention,
    convolution,
    creation,
    experts,
    indexing,
    kernels,
    loss,
    matmul,
    normalisation,
    pointwise,
    recurrence,
    reduction,
    views,
    writing,
)
from lightning_autotp.operators.pointwise import declare_elementwise
from lightning_autotp.operators.registry import (
    Dims,
    Record,
    Relation,
    Shapes,
    count_flops,
    count_touched,
    elementwise_bases,
    functional,
    known_operators,
    operator,
    record,
    records,
    relate,
    updated,
)

__all__ = [
    "Dims",
    "Record",
    "Relation",
    "Shapes",
    "count_flops",
    "count_touched",
    "declare_elementwise",
    "elementwise_bases",
    "functional",
    "known_operators",
    "operator",
    "record",
    "records",
    "relate",
    "updated",
]
