"""16-bit precisions at two ranks, against one process in the same precision."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from copies import OneKeyHead
from lightning.pytorch.plugins import MixedPrecision
from trainer_ranks import run_trainer_ranks
from training import fit

STEPS = 6
# The spacing of bfloat16 near 1 is 2^-7, of float16 2^-10; the losses are about 4 and summed in float32.
PRECISIONS = {"bf16-true": 2**-7, "bf16-mixed": 2**-8, "16-mixed": 2**-10}


def trained(strategy: str, devices: int, precision: str) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        options = {"plugins": [MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))]}
    return fit(strategy, devices, OneKeyHead("config"), max_steps=STEPS, gradient_clip_val=1.0, **options)


def two_ranks() -> dict[str, Any]:
    return {precision: trained("autotp", 2, precision) for precision in PRECISIONS}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_trainer_ranks(two_ranks, 2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_equal_one_process_within_the_precision(two: list[dict[str, Any]], precision: str) -> None:
    wanted = trained("auto", 1, precision)
    exact = trained("auto", 1, "32-true")
    assert wanted["losses"] != exact["losses"]
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    for seen in two:
        assert seen[precision]["losses"] == two[0][precision]["losses"]
        assert {weight.dtype for weight in seen[precision]["weights"].values()} == {dtype}
        torch.testing.assert_close(
            torch.tensor(seen[precision]["losses"]),
            torch.tensor(wanted["losses"]),
            rtol=PRECISIONS[precision],
            atol=0,
        )
