"""Scales of quantized weights for which a rank's part is not enough: all ranks come to those of one process.

===========================  ==============================================  ======================================
what is quantized            what a scale depends on                         what is exchanged
===========================  ==============================================  ======================================
a row, of which a rank has   the row's least and largest element             these, before the part is quantized:
a part                                                                       :func:`share_extremes`
the scales of 4-bit blocks   the mean of all, and the 256 next to it         the scales, after the parts are
(double quantization)                                                        quantized: :func:`quantize_scales`
===========================  ==============================================  ======================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_autotp.layouts.blocks import in_units, index
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.quantized.formats import FourBit, library_of
from lightning_autotp.quantized.weight import QuantizedWeight
from lightning_autotp.ranks.group import TPGroup


def share_extremes(extremes: Mapping[str, Tensor], group: TPGroup) -> None:
    """Make the extremes of parts of rows those of whole rows, in place. Collective.

    Args:
        extremes: by name, what is larger counts; of the same weights on every rank.
        group: the tensor-parallel group.
    """
    for largest in extremes.values():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group.process_group)


def quantize_scales(model: nn.Module) -> None:
    """Round the scales of 4-bit weights as double quantization does. Collective, where there are such weights.

    They are kept as they come out, 32 bits for each block: the 8 bits that one process keeps lie in blocks that go
    across the ranks' parts.

    Args:
        model: a parallel model whose parameters are filled.
    """
    state = parallel_state(model)
    done: set[str] = set()
    for place in state.places(model):
        weight, name = place.parameter, place.meta.name
        if isinstance(weight, QuantizedWeight) and name not in done and isinstance(place.meta.format, FourBit):
            done.add(name)
            if place.meta.format.is_double:
                _quantize(weight, place.meta, place.meta.format, state.group)


def _quantize(weight: QuantizedWeight, meta: ParameterMeta, format: FourBit, group: TPGroup) -> None:
    functional: Any = library_of("bitsandbytes").functional
    layer: Any = weight.layer
    own: Tensor = layer.weight.quant_state.absmax
    rows, columns = meta.shape
    whole = own.new_zeros(rows, columns // format.block)
    parts = own.view(meta.local_shape[0], -1)
    places = [
        (in_units(part.local, 1, format.block), in_units(part.original, 1, format.block)) for part in meta.mapping
    ]
    for local, original in places:
        whole[index(original)] = parts[index(local)]
    dist.all_reduce(whole, dist.ReduceOp.MAX, group.process_group)
    scales = whole.flatten()
    mean = scales.mean()
    rounded = functional.dequantize_blockwise(*functional.quantize_blockwise(scales - mean, blocksize=256))
    rounded = (rounded + mean).view(whole.shape)
    for local, original in places:
        parts[index(local)] = rounded[index(original)]
