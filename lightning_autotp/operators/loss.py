"""Losses."""

from __future__ import annotations

from math import prod

from lightning_autotp.layouts.dims import Dim
from lightning_autotp.operators.graph import KERNEL_LINEAR_LOSS, KERNEL_LOSS
from lightning_autotp.operators.registry import Dims, Shapes, Site, operator


@operator("aten.cross_entropy_loss.default", KERNEL_LOSS)
def cross_entropy(site: Site) -> Dims:
    """``self [n, c, ...]``, ``target [n, ...]``: sharded classes take a loss made for them.

    Targets that are probabilities (``[n, c, ...]``) need all classes.
    """
    dims, target = site.dims("self"), site.dims("target")
    classes = 1 if len(dims) > 1 else 0
    if len(target) == len(dims):
        site.keep_whole(dims[classes], because="a loss whose targets are probabilities needs all classes")
    else:
        site.contract(dims[classes])
        site.relation.needs_implementation = True
    return _over_tokens(site, *(dim for index, dim in enumerate(dims) if index != classes))


def _over_tokens(site: Site, *tokens: Dim) -> Dims:
    out = tuple(site.new(size) for size in site.shape)
    others = *site.dims("target"), *(site.tensor("weight") or ()), *out
    site.keep_whole(*tokens, *others, because="the loss is over all tokens")
    return out


def _product(shapes: Shapes) -> float:
    return 2 * prod(shapes["input"]) * shapes["linear_weight"][0]


@operator(KERNEL_LINEAR_LOSS, flops=_product)
def linear_cross_entropy(site: Site) -> Dims:
    """``input [n, h]``, ``linear_weight [c, h]``, ``linear_bias [c]``, ``target [n]``: the loss of their product.

    Sharded classes take a loss made for them, which needs all of the hidden states.
    """
    (tokens, features), (classes, columns) = site.dims("input"), site.dims("linear_weight")
    for dim in site.tensor("linear_bias") or ():
        site.tie(classes, dim)
    site.contract(classes)
    site.relation.needs_implementation = True
    site.keep_whole(features, columns, because="the loss is not linear in the product")
    return _over_tokens(site, tokens)


@operator("aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default")
def picked_loss(site: Site) -> list[Dims]:
    """The classes' log-probabilities are picked by index, over all tokens."""
    return site.give_up("the loss needs all classes and tokens")


_ELEMENTWISE = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
)  # fmt: skip


@operator(*(f"aten.{name}.default" for name in _ELEMENTWISE))
def elementwise_loss(site: Site) -> Dims | list[Dims]:
    """Element by element if not reduced (``reduction`` 0), else over all of them."""
    if site["reduction"]:
        return site.give_up("the loss is over all elements")
    return site.broadcast(list(site.relation.inputs.values()))


# Every rank computes it on whole log-probabilities. Its targets may be of any lengths, laid end to end.
operator("aten.ctc_loss.IntList", "aten.ctc_loss.Tensor", takes="log_probs")
