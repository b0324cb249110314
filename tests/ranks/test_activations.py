"""What a decoder block keeps for the backward pass, as ``benchmarks/activations.py`` measures it: exact bytes."""

from __future__ import annotations

import torch
from activations import ATTENTION, MLP, OUTSIDE, SYSTEMS, Kept, Shapes, measure
from distributed import run_ranks

ROWS, LENGTH, WIDTH = 2, 16, 64
LLAMA = Shapes(
    "llama",
    {
        "hidden_size": WIDTH,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 132,
    },
    {},
    ROWS,
    LENGTH,
)


def kept(rank: int, size: int) -> dict[str, Kept]:
    return measure(LLAMA, torch.float32)


def test_outside_attention_and_mlp_a_rank_keeps_half_with_sequence_parallelism() -> None:
    for found in run_ranks(kept, 2):
        one, plain, parallel = (found[system] for system in SYSTEMS)
        for block in (0, 1):
            # Of each of two norms, in float32: its input, what it divides by, one number a token, the input divided by
            # that, and the result, which is the input of what follows.
            assert one[block, OUTSIDE] == 4 * 2 * ROWS * LENGTH * (3 * WIDTH + 1)
            assert plain[block, OUTSIDE] == one[block, OUTSIDE]
            # The first block's input is sharded where it enters, so that belongs to the block, as in no other.
            entering = 4 * ROWS * LENGTH * WIDTH if block == 0 else 0
            assert 2 * parallel[block, OUTSIDE] == one[block, OUTSIDE] + entering
            assert 2 * plain[block, MLP] == one[block, MLP]
            for region in (ATTENTION, MLP):  # not what was gathered for it
                assert parallel[block, region] == plain[block, region]
