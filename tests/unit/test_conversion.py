"""Conversions on the way from the checkpoint: done per block, bit for bit, and undone on the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from converted import Converted, ConvertedConfig, all_operations, conversions, original_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import assert_local_part, localize
from safetensors.torch import save_file
from torch import Tensor
from transformers import conversion_mapping
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from lightning_autotp.building import weight_conversion as conversion
from lightning_autotp.building.deferred import deferred_init
from lightning_autotp.building.recipe import Recipe
from lightning_autotp.building.weight_conversion import RecipeReader, same_values
from lightning_autotp.loading.parameters import load_parameters
from lightning_autotp.pretrained.meta_model import meta_model

Box = tuple[tuple[int, int], ...]


@dataclass
class Shelf:
    """A source in memory that notes how many elements are read from it."""

    value: Tensor
    read_elements: list[int] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def read(self, box: Sequence[tuple[int, int]] | None = None) -> Tensor:
        part = self.value if box is None else self.value[tuple(slice(*run) for run in box)]
        self.read_elements.append(part.numel())
        return part.clone(memory_format=torch.contiguous_format)


def recipe_of(convert: Callable[..., Tensor], *values: Tensor) -> tuple[Recipe, list[Shelf], Tensor]:
    """The recorded ``convert`` of sources with these values, the sources, and what it gives."""
    shelves = [Shelf(value) for value in values]
    with deferred_init() as recorder:
        recipe = recorder.recipe_of(convert(*[recorder.source(shelf) for shelf in shelves]))
    return recipe, shelves, convert(*values)


def whole_box(value: Tensor) -> Box:
    return tuple((0, size) for size in value.shape)


def of_box(value: Tensor, box: Box) -> Tensor:
    return value[tuple(slice(*run) for run in box)]


def draw_box(data: st.DataObject, shape: Sequence[int]) -> Box:
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    return tuple((start, data.draw(st.integers(start + 1, size))) for start, size in zip(low, shape, strict=True))


def wholes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of the tensors that are made whole from here on."""
    made: list[tuple[int, ...]] = []
    make = Recipe.__call__

    def call(recipe: Recipe) -> Tensor:
        made.append(recipe.target.size)
        return make(recipe)

    monkeypatch.setattr(Recipe, "__call__", call)
    return made


REARRANGING: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda t: t.to(torch.float64),
    "transpose": lambda t: t.transpose(0, 1),
    "contiguous": lambda t: t.transpose(0, 1).contiguous(),
    "chunk": lambda t: t.chunk(2, dim=0)[1].contiguous(),
    "narrow": lambda t: t.narrow(1, 1, t.shape[1] - 1),
    "select": lambda t: torch.stack([t, t.clone()], dim=1)[:, 1],
    "cat": lambda t: torch.cat([t, t.clone()], dim=1),
    "stack": lambda t: torch.stack([t.clone(), t], dim=-1)[..., 0],
    "unsqueeze": lambda t: t[:, None].clone().squeeze(1),
}


@settings(max_examples=150)
@given(st.data())
def test_any_rearrangement_is_done_per_block(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(4, 9), st.integers(4, 9)))
    names = data.draw(st.lists(st.sampled_from(sorted(REARRANGING)), max_size=4))
    # Lengths stay at least two through halvings and narrowings: start long enough.
    start = torch.randperm(shape[0] * shape[1] * 64).reshape(shape[0] * 8, shape[1] * 8).float()

    def convert(tensor: Tensor) -> Tensor:
        for name in names:
            tensor = REARRANGING[name](tensor)
        return tensor

    recipe, (shelf,), expected = recipe_of(convert, start)
    assert torch.equal(recipe(), expected)
    assert recipe().dtype == expected.dtype
    shelf.read_elements.clear()
    box = draw_box(data, expected.shape)
    ((number, piece, part),) = RecipeReader(recipe).pieces([box])
    assert (number, piece) == (0, box)
    assert part.dtype == expected.dtype
    assert torch.equal(part, of_box(expected, box))
    assert sum(shelf.read_elements) <= part.numel(), "read more than the block"


@st.composite
def factors(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[int], list[int]]:
    """A shape whose dims are split into factors, which are permuted and merged again, and how often."""
    split = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3))
    shape = [torch.Size(part).numel() for part in split]
    flat = [factor for part in split for factor in part]
    order = draw(st.permutations(range(len(flat))))
    bounds = draw(st.lists(st.integers(0, len(flat)), max_size=3))
    return shape, split, order, sorted(bounds)


@settings(max_examples=200)
@given(st.data())
def test_dims_are_split_permuted_merged_and_cut_per_block(data: st.DataObject) -> None:
    """Whatever reshapes and transposes can do to a tensor, which is how projections are interleaved or permuted."""
    shape, split, order, bounds = data.draw(factors())
    flat = [factor for part in split for factor in part]
    mixed = [flat[at] for at in order]
    pieces = [mixed[low:high] for low, high in zip([0, *bounds], [*bounds, len(mixed)], strict=True)]
    merged = [torch.Size(piece).numel() for piece in pieces]
    cut = [data.draw(st.integers(0, size - 1)) for size in merged]

    def convert(tensor: Tensor) -> Tensor:
        made = tensor.reshape(flat).permute(order).reshape(merged)
        for dim, start in enumerate(cut):
            made = made.narrow(dim, start, merged[dim] - start)
        return made

    recipe, _, expected = recipe_of(convert, torch.randperm(torch.Size(shape).numel()).reshape(shape))
    box = draw_box(data, expected.shape)
    with pytest.MonkeyPatch.context() as patch:
        made = wholes(patch)
        ((_, _, part),) = RecipeReader(recipe).pieces([box])
    assert torch.equal(part, of_box(expected, box))
    if not any(cut):
        assert not made


INTERLEAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "rotary halves": lambda t: t.view(4, 3, 2, 8).transpose(1, 2).reshape(24, 8),
    "and back": lambda t: t.view(4, 2, 3, 8).transpose(1, 2).reshape(24, 8),
    "every other column": lambda t: t.reshape(24, 4, 2).transpose(1, 2).reshape(24, 8).contiguous(),
    "one of three interleaved": lambda t: t.view(4, 3, 2, 8)[:, 1].reshape(8, 8).contiguous(),
    "every third": lambda t: t[1::3],
    "flattened kernel": lambda t: t.reshape(24, 2, 2, 2).reshape(24, -1).contiguous(),
    "kernel": lambda t: t.reshape(24, 2, 2, 2).contiguous(),
    "broadcast scales": lambda t: (t.reshape(2, 12, 4, 2) * t[:2, :4].reshape(2, 4)[:, None, :, None]).reshape(24, 8),
    "shifted": lambda t: t + 1 - t.transpose(0, 1).contiguous().transpose(0, 1) * 0.5,
    "expanded": lambda t: t[:, :1].expand(24, 5),
    "rows in a row": lambda t: t.reshape(-1),
}


@pytest.mark.parametrize("name", INTERLEAVING)
def test_interleaved_and_elementwise_conversions_are_done_per_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, (shelf,), expected = recipe_of(INTERLEAVING[name], torch.randn(24, 8))
    made = wholes(monkeypatch)
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 64)
    result = torch.full_like(expected, torch.nan)
    boxes = [
        tuple((0, size) if dim else run for dim, size in enumerate(expected.shape))
        for run in ((0, 5), (5, len(expected)))
    ]
    for _, piece, part in RecipeReader(recipe).pieces(boxes):
        of_box(result, piece).copy_(part)
        assert sum(shelf.read_elements) <= 6 * max(part.numel(), 4), "read much more than the block"
        shelf.read_elements.clear()
    assert torch.equal(result, expected)
    assert not made


@pytest.mark.parametrize("convert", [
    lambda t: t ** 2,
    lambda t: t.clone().mul_(3),
    lambda t: t.flip(0),
    lambda t: t.view(torch.int32),
    lambda t: torch.cat([t.reshape(8, 12), t.reshape(8, 12)]).t(),
    lambda t: t.flatten()[5:65].reshape(5, 12),
    lambda t: t.add(t, alpha=2),
    lambda t: t.to(torch.int32) / 2,
    lambda t: t.to(torch.float64) * t,
    lambda t: torch.cumsum(t, 0).chunk(2)[1],
])  # fmt: skip
def test_other_conversions_are_right_too(convert: Callable[[Tensor], Tensor]) -> None:
    recipe, _, expected = recipe_of(convert, torch.randn(12, 8))
    box = tuple((size // 3, size - 1) for size in expected.shape)
    found = {number: (piece, part) for number, piece, part in RecipeReader(recipe).pieces([box, whole_box(expected)])}
    for number, wanted in enumerate([box, whole_box(expected)]):
        piece, part = found[number]
        assert piece == wanted
        assert part.dtype == expected.dtype
        assert torch.equal(part, of_box(expected, wanted))


def test_a_tensor_is_read_as_it_was_when_it_was_used() -> None:
    def convert(one: Tensor, other: Tensor) -> Tensor:
        scratch = torch.empty_like(one)
        scratch.copy_(one)
        first = scratch.clone()
        scratch.copy_(other).add_(1)
        return torch.cat([first, scratch.clone(), scratch], dim=1)

    recipe, _, expected = recipe_of(convert, torch.randn(4, 3), torch.randn(4, 3))
    ((_, _, part),) = RecipeReader(recipe).pieces([((1, 3), (2, 8))])
    assert torch.equal(part, expected[1:3, 2:8])


def test_experts_merged_as_transformers_does() -> None:
    def merge(*experts: Tensor) -> Tensor:
        gate, up = torch.stack(list(experts[:3])), torch.stack(list(experts[3:]))
        return torch.cat([gate, up], dim=1)

    recipe, shelves, expected = recipe_of(merge, *torch.randn(6, 10, 7))
    boxes = [((1, 2), (3, 5), (2, 6)), ((1, 2), (13, 15), (2, 6))]
    for _, piece, part in RecipeReader(recipe).pieces(boxes):
        assert torch.equal(part, of_box(expected, piece))
    assert [sum(shelf.read_elements) for shelf in shelves] == [0, 8, 0, 0, 8, 0]


def test_what_must_be_made_whole_is_one_part_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown operator on each expert costs one expert at a time, not the merged parameter."""

    def merge(*experts: Tensor) -> Tensor:
        return torch.stack([expert.exp2() for expert in experts]).to(torch.bfloat16)

    recipe, shelves, expected = recipe_of(merge, *torch.randn(5, 6, 8))
    made = wholes(monkeypatch)
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 32)
    blocks = RecipeReader(recipe)
    kept = 0
    boxes = [((1, 4), (4, 6), (0, 8)), ((1, 4), (0, 2), (2, 6))]
    for _, piece, part in blocks.pieces(boxes):
        assert torch.equal(part, of_box(expected, piece))
        kept = max(kept, len(blocks._whole))
    assert made == [(6, 8)] * 3
    assert kept <= 2, "the expert of the last piece and of this one"
    assert [sum(shelf.read_elements) for shelf in shelves] == [0, 48, 48, 48, 0]


def test_values_are_compared_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 64)
    value = torch.randn(10, 8)
    other = value.clone()
    other[9, 7] += 1
    (one, shelves, _), (two, _, _), (three, _, _) = (recipe_of(lambda t: t, v) for v in (value, value.clone(), other))
    assert same_values(one, two)
    assert max(shelves[0].read_elements) == 16
    assert not same_values(one, three)
    assert not same_values(one, recipe_of(lambda t: t.double(), value)[0])


def test_pieces_are_small_in_every_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "CHUNK_BYTES", 100)
    recipe, shelves, expected = recipe_of(lambda t: t.clone(), torch.randn(3, 7, 11))
    box = ((0, 3), (2, 7), (1, 9))
    result = torch.full_like(expected, torch.nan)
    for _, piece, part in RecipeReader(recipe).pieces([box]):
        assert part.nbytes <= 100
        of_box(result, piece).copy_(part)
    assert torch.equal(of_box(result, box), of_box(expected, box))
    assert sum(shelves[0].read_elements) == 3 * 5 * 8
    assert list(RecipeReader(recipe).pieces([((0, 3), (2, 2), (1, 9))])) == []


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())
    get_checkpoint_conversion_mapping("llama")  # fills the cache, of which a copy is changed
    cache = dict(conversion_mapping._checkpoint_conversion_mapping_cache)
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", cache)
    register_checkpoint_conversion_mapping("Converted", conversions())
    ConvertedConfig().save_pretrained(tmp_path)
    save_file(original_tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@all_operations
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (1, 3), (2, 3)])
def test_every_operation_of_transformers_is_done_per_block(
    converted: Path, rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, report = Converted.from_pretrained(converted, output_loading_info=True)
    assert not any(report.values()), report
    made = wholes(monkeypatch)
    with meta_model():
        model = Converted.from_pretrained(converted)
    localize(model, rank, ranks)
    load_parameters(model)
    assert_local_part(model, expected)
    assert not made
