"""Attention kernels: independent per batch and head."""

from __future__ import annotations

from math import prod

from lightning_autotp.layouts.dims import product
from lightning_autotp.operators.registry import Dims, Shapes, Site, operator


def _attention_flops(shapes: Shapes) -> float:
    """Scores ``[..., s, t]`` from d key features each, then their product with values of e features."""
    *scores, features = shapes.out
    return 2 * prod(scores) * shapes["key"][-2] * (shapes["query"][-1] + features)


@operator(
    "aten.scaled_dot_product_attention.default",
    flops=_attention_flops,
    groups=(("key", -3, "query", -3), ("value", -3, "query", -3)),
    groups_if="enable_gqa",
)
def scaled_dot_product_attention(site: Site) -> Dims | list[Dims]:
    """``query [b, h, s, d]``, ``key [b, h or h_kv, t, d]``, ``value [b, h or h_kv, t, e]`` -> ``[b, h, s, e]``.

    Sequences and the key features stay whole, but for queries that a mask does not tell apart (those of a new token's
    heads, that code has put there); with dropout, whose mask is ``[b, h, s, t]``, the value features, too.
    With ``enable_gqa`` each key/value head serves ``h / h_kv`` query heads.
    """
    query, key, value = site.dims("query"), site.dims("key"), site.dims("value")
    if not 3 <= len(query) == len(key) == len(value):
        return site.give_up("attention without heads, or over tensors with different numbers of dims")
    heads, length, features = query[-3:]
    mask = site.tensor("attn_mask")
    batch = site.broadcast([query[:-3], key[:-3], value[:-3], () if mask is None else mask[:-3]])
    for other in (key, value):
        if other[-3].size == heads.size:
            site.tie(heads, other[-3])
        else:
            site.tie(heads, product([other[-3], site.new(heads.size // other[-3].size)]))
    site.tie(features, key[-1])
    needed = [features, key[-2], value[-2], *(() if mask is None else mask[-2:])]
    if mask is None or mask[-2].size != 1 or site["is_causal"]:
        needed.append(length)
    site.keep_whole(*needed, because="attention needs whole sequences and key features")
    if mask is not None and len(mask) > 2 and mask[-3].size != 1:
        site.tie(heads, mask[-3])
    if site.draws(when=site["dropout_p"]):
        site.keep_whole(value[-1], because="attention's dropout draws one mask for all features of a value")
    return (*batch, heads, length, value[-1])
