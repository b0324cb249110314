"""The plan of a model some of whose parameters have become longer or shorter, as when a vocabulary grows.

What is cut stays cut along the same axes. An axis that has more or fewer units now is sharded anew, as evenly as it
goes, in every layout that has it. Whether the model's operators still allow that is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lightning_autotp.layouts.dims import Axis
from lightning_autotp.layouts.plan import ConversionPlan, ParameterPlan, Plan
from lightning_autotp.layouts.types import Layout, Shard

Shapes = Mapping[str, tuple[int, ...]]
"""Whole shapes, by the names of parameters."""


def with_lengths(plan: Plan, shapes: Shapes) -> Plan:
    """The same plan at other lengths.

    Args:
        plan: how the model is divided.
        shapes: the shapes that parameters have now; those that are not named have the ones of before.

    Returns:
        A plan that says of which step it is the cheapest of no step, because none was looked for.

    Raises:
        ValueError: if a dim that is cut has another length, and the plan does not tell what of it each rank gets then.
    """
    units: dict[int, int] = {}
    for parameter in plan.parameters:
        for axis, length in _axes(parameter, shapes.get(parameter.names[0], parameter.shape)):
            if units.setdefault(axis, length) != length:
                raise ValueError(f"{parameter.names[0]} has {length} rows, and others that are cut with it have others")
    return replace(
        plan,
        parameters=tuple(_parameter(parameter, shapes, units) for parameter in plan.parameters),
        conversions=tuple(_conversion(conversion, units) for conversion in plan.conversions),
        priced_for="",
        gap=0.0,
    )


def _axes(parameter: ParameterPlan, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The axes along which a parameter is cut, and how many units they have when it has this shape."""
    if not isinstance(parameter.layout, Shard):
        return
    name, layout = parameter.names[0], parameter.layout
    for place, (dim, ownership) in enumerate(layout.dims):
        cut = layout.cuts[place] if layout.cuts else None
        if cut is not None and len(cut.axes) == 1 and isinstance(cut.dim, Axis):
            yield cut.axes[0], shape[dim]
        elif shape[dim] != ownership.size:
            raise ValueError(
                f"{name} has {ownership.size} indices along dim {dim}, which are not sharded one by one: with"
                f" {shape[dim]} the plan does not say which rank has which"
            )


def _parameter(parameter: ParameterPlan, shapes: Shapes, units: Mapping[int, int]) -> ParameterPlan:
    shape = shapes.get(parameter.names[0], parameter.shape)
    reasons = tuple(replace(reason, length=shape[reason.dim]) for reason in parameter.reasons)
    return replace(parameter, shape=shape, layout=_layout(parameter.layout, units), reasons=reasons)


def _conversion(conversion: ConversionPlan, units: Mapping[int, int]) -> ConversionPlan:
    return replace(conversion, source=_layout(conversion.source, units), target=_layout(conversion.target, units))


def _layout(layout: Layout, units: Mapping[int, int]) -> Layout:
    if not isinstance(layout, Shard) or not layout.cuts:
        return layout
    cuts = zip(layout.dims, layout.cuts, strict=True)
    return Shard.of({dim: cut.sharded_anew(units) for (dim, _), cut in cuts})
