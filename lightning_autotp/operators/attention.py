"""Attention kernels: independent per batch and head."""

from __future__ import annotations

from math import prod

from lightning_autotp.layouts.dims import product
from lightning_autotp.operators.registry import Dims, Shapes, Site, operator

_WHY = "attention needs whole sequences and key features"


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
    return _attended(site, site.tensor("attn_mask"))


@operator("aten._scaled_dot_product_flash_attention.default", flops=_attention_flops)
def flash_attention(site: Site) -> list[Dims]:
    """What ``scaled_dot_product_attention`` runs, under a name of its own; no mask but ``is_causal``.

    After the attention it gives the sums of the scores' exponentials, ``[b, h, ...]``, and what is of no head: where
    its random numbers begin.
    """
    return _with_sums(site, None)


@operator(
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    flops=_attention_flops,
)
def attention_with_a_bias(site: Site) -> list[Dims]:
    """As the above, with a bias ``[b, h, s, t]`` of the scores."""
    return _with_sums(site, site.tensor("attn_bias"))


def _with_sums(site: Site, mask: Dims | None) -> list[Dims]:
    if dict(site.operator.arguments).get("return_debug_mask"):
        return site.give_up("attention with return_debug_mask, whose shape is the kernel's own")
    attended = _attended(site, mask)
    if isinstance(attended, list):
        return attended
    *independent, length, features = attended
    site.keep_whole(length, because=_WHY)
    results = [(*independent, length, features)]
    for at, shape in enumerate(site.shapes[1:], start=1):
        own = tuple(site.new(size) for size in (shape[len(independent) :] if at == 1 else shape))
        site.keep_whole(*own, because="attention's kernel has them for itself")
        results.append((*independent, *own) if at == 1 else own)
    return results


def _attended(site: Site, mask: Dims | None) -> Dims | list[Dims]:
    query, key, value = site.dims("query"), site.dims("key"), site.dims("value")
    if not 3 <= len(query) == len(key) == len(value):
        return site.give_up("attention without heads, or over tensors with different numbers of dims")
    heads, length, features = query[-3:]
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
    site.keep_whole(*needed, because=_WHY)
    if mask is not None and len(mask) > 2 and mask[-3].size != 1:
        site.tie(heads, mask[-3])
    if site.draws(when=site["dropout_p"]):
        site.keep_whole(value[-1], because="attention's dropout draws one mask for all features of a value")
    return (*batch, heads, length, value[-1])
