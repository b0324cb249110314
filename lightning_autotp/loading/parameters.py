"""Filling this rank's parameters, one at a time, reading no more than this rank's part of them.

Every parameter of a model built without memory has a :class:`~lightning_autotp.building.recipe.Recipe`: recorded
initialization, tensors that are already there, or tensors in checkpoint files, perhaps converted on the way (cast,
stacked, concatenated, cut, transposed). :func:`load_parameters` takes the blocks of ``ParameterMeta.mapping`` from it.
A block of a file's tensor is read as that block, in small pieces; conversions are done per block where
:mod:`~lightning_autotp.building.weight_conversion` can, else one tensor at a time is made whole, and cut. So host
memory stays under this rank's parameters plus the largest tensor.

Pages of a mapped file count as this process's memory until it is unmapped: it is, as soon as ``CHUNK_BYTES`` of it may
have been touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_autotp.building.checkpoint_reading import (
    CheckpointError,
    MismatchError,
    changed_tensor,
    files_kept_open,
    read_headers,
)
from lightning_autotp.building.recipe import Recipe
from lightning_autotp.building.weight_conversion import RecipeReader
from lightning_autotp.layouts.blocks import Block, Box, in_units, index, whole_box
from lightning_autotp.layouts.names import join_names
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parameters.host_memory import offloaded, to_device
from lightning_autotp.parameters.local_blocks import held_blocks, plain
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.parameters.state import ParameterPlace, model_group, parallel_models
from lightning_autotp.private.torch_private import parameters_of
from lightning_autotp.quantized.formats import QuantizationError
from lightning_autotp.quantized.weight import QuantizedWeight


def check_checkpoint(model: nn.Module) -> None:
    """Check, reading only headers, that the files a parallel model was built from are whole and what they were.

    Raises:
        CheckpointError: otherwise; a :class:`MismatchError` names every tensor that changed.
    """
    for source in (source for _, state in parallel_models(model) for source in state.sources.values()):
        now = read_headers(source.files)
        wrong = [
            changed_tensor(tensor, now.get(name)) for name, tensor in source.tensors.items() if now.get(name) != tensor
        ]
        if wrong:
            raise MismatchError("\n".join(wrong))


def row_extremes(model: nn.Module, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Of quantized weights whose rows are cut and have one scale each, the extremes of this rank's part of each row.

    These parts are read for that, and read again by :func:`load_parameters`. Not collective.

    Returns:
        By the weight's name the least element of each row, its sign changed, and the largest one: ``[out, 2]``.

    Raises:
        CheckpointError: as :func:`load_parameters`.
    """
    found: dict[str, Tensor] = {}
    for part, state in parallel_models(model):
        for place in state.places(part):
            meta = place.meta
            cut = isinstance(meta.layout, Shard) and meta.layout.ownership(1) is not None
            if cut and meta.need_initialize and meta.format is not None and meta.format.shares_rows:
                if not found:
                    check_checkpoint(model)
                with files_kept_open():
                    values = _read(place.parameter, meta, torch.device(device or "cpu"))
                found[meta.name] = torch.stack([-values.amin(1), values.amax(1)], 1).float()
    return found


def load_parameters(
    model: nn.Module,
    device: torch.device | str | None = None,
    extremes: Mapping[str, Tensor] | None = None,
    told: Callable[[int], None] = lambda size: None,
) -> None:
    """Fill this rank's parameters, one at a time. Not collective.

    Each parameter that ``ParameterMeta.need_initialize`` marks is replaced by a real one of its local shape (tied ones
    by one), which keeps what attributes the user has put on it.

    Args:
        model: a parallel model, or a module that holds one: its metas say how to make the whole tensors.
        device: where the model goes; by default parameters on meta go to the CPU and all else stays where it is.
        extremes: what :func:`row_extremes` gives, of whole rows.
        told: is told of each parameter how many bytes it has.

    Raises:
        CheckpointError: if files are missing, damaged or changed (checked before anything is read), or a parameter has
            nothing to be filled from.
        RuntimeError: if no parallel model is found, or there are parameters in it of which nothing is known.
    """
    model_group(model)
    waiting: dict[nn.Parameter, list[ParameterPlace]] = {}
    for part, state in parallel_models(model):
        for place in state.places(part):
            if place.meta.need_initialize:
                waiting.setdefault(place.parameter, []).append(place)
    first = [places[0] for places in waiting.values()]
    empty = [place.name for place in first if place.meta.init_fn is None]
    if empty:
        raise CheckpointError(
            f"nothing is known to fill {len(empty)} parameters from, which were made on the meta device elsewhere, or"
            f" belong to another parallel model, too: {join_names(empty)}. Build the"
            " model in configure_model()"
        )
    wrong = [
        f"{place.name}: {tuple(place.parameter.shape)} instead of {place.meta.local_shape}"
        for place in first
        if tuple(place.parameter.shape) != place.meta.local_shape
    ]
    if wrong:
        raise CheckpointError("local parameters do not have the shapes that their layouts give:\n" + "\n".join(wrong))
    check_checkpoint(model)
    devices = dict.fromkeys(waiting, torch.device(device or "cpu")) | dict.fromkeys(
        offloaded(model), torch.device("cpu")
    )
    with files_kept_open():
        for parameter, places in waiting.items():
            whole_rows = (extremes or {}).get(places[0].meta.name)
            filled = _fill(parameter, places[0].meta, devices[parameter], whole_rows)
            for place in places:
                parameters_of(place.module)[place.attribute] = filled
            told(parameter.nbytes)
    if device is not None:
        to_device(model, device)


def _read(parameter: nn.Parameter, meta: ParameterMeta, device: torch.device) -> Tensor:
    """A parameter's values, laid out as the parameter is; of one that is quantized as they were loaded."""
    dtype = parameter.dtype if meta.format is None else meta.format.dtype  # a precision plugin may have changed it
    values = torch.empty_like(parameter, dtype=dtype, device=device, memory_format=torch.contiguous_format)
    recipe = meta.init_fn if isinstance(meta.init_fn, Recipe) else Recipe.given(meta.init_fn())  # type: ignore[misc]
    if recipe.target.size != meta.shape:
        raise CheckpointError(f"{meta.name} is initialized as {recipe.target.size} but has the shape {meta.shape}")
    _copy(plain(values), recipe, held_blocks(parameter, meta, meta.ranks))
    return values


def _copy(target: Tensor, recipe: Recipe, blocks: Sequence[Block]) -> None:
    """Copy blocks of what a recipe makes to a tensor."""
    with torch.no_grad():
        for number, piece, part in RecipeReader(recipe).pieces([block.original for block in blocks]):
            target[index(blocks[number].place(piece))].copy_(part)


def _read_stored(parameter: nn.Parameter, meta: ParameterMeta, device: torch.device) -> QuantizedWeight:
    """A weight that is quantized in the files: the library's layer of this shape, with this process's part of them."""
    assert meta.format is not None
    blank = torch.zeros(plain(parameter).shape, dtype=meta.format.dtype, device=device)
    weight = QuantizedWeight.of(blank, meta.format, parameter.dtype)
    blocks = held_blocks(parameter, meta, meta.ranks)
    for name, made in meta.format.tensors(weight.layer).items():
        recipe = (meta.format.stored or {})[name]
        width = recipe.target.size[1]

        def along(box: Box, width: int = width) -> Box:
            """A box of the weight in the elements of the tensor."""
            return (box[0], (0, 1)) if width == 1 else in_units(box, 1, meta.shape[1], width)

        _, (_, columns) = along(whole_box(blank.shape))
        if (made.dtype, made.shape[1]) != (recipe.target.dtype, columns):
            raise QuantizationError(
                f"{meta.name} is quantized in the checkpoint with {name} {recipe.target.size} of {recipe.target.dtype},"
                f" but its library now makes {tuple(made.shape)} of {made.dtype} for a part {tuple(blank.shape)} of it:"
                " save the checkpoint again with this version of the library"
            )
        _copy(made, recipe, [Block(along(block.local), along(block.original), block.ranks) for block in blocks])
    return weight


def _fill(
    parameter: nn.Parameter, meta: ParameterMeta, device: torch.device, extremes: Tensor | None = None
) -> nn.Parameter:
    """A real parameter for a meta one, with the values that belong into this process."""
    values: Tensor
    if meta.format is None:
        values = _read(parameter, meta, device)
    elif meta.format.stored is not None:
        values = _read_stored(parameter, meta, device)
    else:
        extremes = None if extremes is None else extremes * extremes.new_tensor([-1.0, 1.0])
        values = QuantizedWeight.of(_read(parameter, meta, device), meta.format, parameter.dtype, extremes)
    filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
    filled.__dict__.update(parameter.__dict__)
    meta.init_fn = None
    meta.need_initialize = False
    return filled
