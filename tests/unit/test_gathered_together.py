"""Which parameters FSDP2 gathers together: a block's trained ones of one dtype, all in 16 bits or none; embeddings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_autotp.gradients.data_parallel import _gathered_together, embeddings_of_their_own
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.parallel.embedding import VocabParallelEmbedding
from lightning_autotp.ranks.group import TPGroup

WIDTH = 8


class Block(nn.Module):
    """A base in some dtype, an adapter and a norm in float32, and parameters without a call of their own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype), nn.Linear(WIDTH, 1, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.scales = nn.ParameterList([torch.zeros(WIDTH)])
        self.shift = nn.Parameter(torch.zeros(WIDTH))


class Mixer(nn.Module):
    """A parameter beside layers; one of these has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(x)[..., :WIDTH] + self.sinks)
        return down


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.norm = Mixer(), nn.LayerNorm(WIDTH)


def frozen() -> Block:
    block = Block(torch.bfloat16)
    block.base.requires_grad_(False)
    return block


MATRICES = {"base.weight", "adapter.weight"}
REST = {"norm.weight", "norm.bias", "scales.0", "shift"}
CASES: dict[str, tuple[Callable[[], nn.Module], set[str], dict[str, set[str]], set[str]]] = {
    "one dtype": (Block, set(), {"": MATRICES | REST}, set()),
    "matrices in 16 bits": (
        Block,
        MATRICES,
        {"norm": {"norm.weight", "norm.bias"}, "": MATRICES},
        {"scales.0", "shift"},
    ),
    "a base in bfloat16": (
        lambda: Block(torch.bfloat16),
        set(),
        {"adapter": {"adapter.weight"}, "norm": {"norm.weight", "norm.bias"}, "": {"base.weight"}},
        {"scales.0", "shift"},
    ),
    "a frozen base in bfloat16": (frozen, set(), {"": MATRICES | REST}, set()),
    "a bias that is not in 16 bits": (
        Around,
        {"mixer.up.weight", "mixer.down.weight"},
        {
            "norm": {"norm.weight", "norm.bias"},
            "mixer.down": {"mixer.down.weight", "mixer.down.bias"},
            "": {"mixer.up.weight"},
        },
        {"mixer.sinks"},
    ),
    "adapters that may be in 16 bits": (frozen, {"adapter.weight"}, {"": MATRICES | REST}, set()),
}
"""A block, what may be gathered in 16 bits, what which module's call gathers, and what stays whole."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_gathered_together(case: str) -> None:
    make, low, wanted, whole = CASES[case]
    block = make()
    names = {parameter: name for name, parameter in block.named_parameters()}
    paths = {module: path for path, module in block.named_modules()}
    stays: set[nn.Parameter] = set()
    found = _gathered_together(block, stays, {parameter for parameter, name in names.items() if name in low})
    assert {paths[module]: {names[parameter] for parameter in gathered} for module, gathered in found} == wanted
    assert found[-1][0] is block
    assert {names[parameter] for parameter in stays} == whole


class Scaled(VocabParallelEmbedding):
    """Does more than look up rows."""


def embedding(words: int, kind: type[VocabParallelEmbedding] = VocabParallelEmbedding) -> VocabParallelEmbedding:
    return kind(words, WIDTH, Ownership.even(words, 2), TPGroup("", 0, 2), device="meta")


class Texts(nn.Module):
    """Words, positions, two blocks (the first of which has an embedding, too), and a head that may be tied."""

    def __init__(self, words: nn.Module, positions: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.words, self.positions = words, positions
        self.layers = nn.ModuleList([nn.Sequential(embedding(99)), nn.Sequential(nn.Linear(WIDTH, WIDTH))])
        self.head = nn.Linear(WIDTH, 32, bias=False)
        if tied:
            self.head.weight = words.weight


def test_which_embeddings_are_gathered_for_their_own_calls() -> None:
    """Those with a quarter of what is in no block that do nothing but look up rows, which they share with nothing."""
    model = Texts(embedding(64), embedding(16))
    assert list(embeddings_of_their_own(model)) == [model.words]
    model = Texts(embedding(64), embedding(64))
    assert list(embeddings_of_their_own(model)) == [model.words, model.positions]
    for words in (embedding(64, Scaled), nn.Embedding(64, WIDTH)):
        assert list(embeddings_of_their_own(Texts(words, embedding(16)))) == []
    assert list(embeddings_of_their_own(Texts(embedding(64), embedding(16), tied=True))) == []
