"""16-bit precisions at two ranks, against one process in the same precision."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from copies import OneKeyHead
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from training import ROWS, Regression, fit, trainer

STEPS = 6
# The spacing of bfloat16 near 1 is 2^-7, of float16 2^-10; the losses are about 4 and summed in float32.
PRECISIONS = {"bf16-true": 2**-7, "bf16-mixed": 2**-8, "16-mixed": 2**-10}


def trained(strategy: str, devices: int, precision: str) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        options = {"plugins": [MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))]}
    return fit(strategy, devices, OneKeyHead("config"), max_steps=STEPS, gradient_clip_val=1.0, **options)


class Written(Regression):
    """Convolutions that have a dtype of their own, as weights of files have, whatever the precision is."""

    example_input_array = None  # planned for what the first step gives them

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            first, last = (nn.Conv1d(*sizes, 3, padding=1, dtype=torch.float32) for sizes in ((1, 14), (14, 1)))
            self.net = nn.Sequential(nn.Unflatten(1, (1, 6)), first, nn.Tanh(), last, nn.Flatten())
            self.scale = nn.Parameter(torch.randn(6))


def written(strategy: str, devices: int) -> list[float]:
    L.seed_everything(3, verbose=False)
    task = Written()
    data: Any = DataLoader(list(ROWS), batch_size=4)  # type: ignore[arg-type]
    trainer(strategy, devices, max_steps=STEPS, precision="bf16-true").fit(task, data)
    assert {parameter.dtype for parameter in task.parameters()} == {torch.bfloat16}
    return task.losses


def two_ranks() -> dict[str, Any]:
    return {precision: trained("autotp", 2, precision) for precision in PRECISIONS} | {"own": written("autotp", 2)}


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


def test_a_model_of_another_dtype_is_planned_for_in_that_of_the_precision(two: list[dict[str, Any]]) -> None:
    wanted = torch.tensor(written("auto", 1))
    for seen in two:
        torch.testing.assert_close(torch.tensor(seen["own"]), wanted, rtol=PRECISIONS["bf16-true"], atol=0)
