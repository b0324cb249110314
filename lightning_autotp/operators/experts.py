"""A mixture's stacked experts as one operator, of which each rank may have some whole.

``hidden_states [t, h]``, ``index [t, c]``, ``weights [t, c]``, parameters ``[e, ...]`` -> ``[t, h]``: what the chosen
experts make of each token, times the weights, added up. Over the experts this is a sum, so ranks that have some of the
experts each give Partial results.
"""

from __future__ import annotations

from math import prod

from lightning_autotp.operators.graph import EXPERTS
from lightning_autotp.operators.registry import Dims, Shapes, Site, operator

_PASSES = 3
"""How often a chosen token's rows go through memory at each matrix: gathered, multiplied, put through an activation."""


def _pairs(shapes: Shapes) -> float:
    return prod(shapes["index"])


def _flops(shapes: Shapes) -> float:
    """Each choice of a token meets one expert's matrices."""
    matrices = [shape for shape in (shapes["weight"], *shapes.each("stacked")) if len(shape) > 2]
    return 2 * _pairs(shapes) * sum(prod(shape[1:]) for shape in matrices)


def _touched(shapes: Shapes) -> float:
    parameters = [shapes["weight"], *shapes.each("stacked")]
    rows = sum(sum(shape[1:]) for shape in parameters if len(shape) > 2)
    return sum(map(prod, parameters)) + _PASSES * _pairs(shapes) * rows


@operator(EXPERTS, flops=_flops, touched=_touched, is_by_choice=True)
def experts(site: Site) -> Dims:
    """The experts are summed over; nothing else may be cut, since each of them is whole on its rank."""
    hidden, weight = site.dims("hidden_states"), site.dims("weight")
    for dims in site.tensors("stacked"):
        site.tie(weight[0], dims[0])
        site.keep_whole(*dims[1:], because=_WHOLE)
    for dims in (weight[1:], hidden, site.dims("index"), site.dims("weights"), *site.tensors("others")):
        site.keep_whole(*dims, because=_WHOLE)
    site.contract(weight[0])
    site.relation.needs_implementation = True
    result = (hidden[0], site.new(site.shape[1]))
    site.keep_whole(*result, because=_WHOLE)
    return result


_WHOLE = "experts are distributed whole here, for all tokens"
