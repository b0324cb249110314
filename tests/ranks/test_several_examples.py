"""Models of which no single batch reaches all parts, and modules whose runs go different ways, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp import full_gradients, make_plan, parallelize
from lightning_autotp.capture.capture import CaptureError, as_calls
from lightning_autotp.layouts.types import Shard


class Tower(nn.Module):
    """What comes before the trunk for one kind of input."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, 3 * hidden), nn.Linear(3 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class SoftTable(nn.Embedding):
    """Rows of a table by their indices, or a mixture of its rows by weights."""

    def forward(self, chosen: Tensor) -> Tensor:
        if chosen.dtype == torch.long:
            return super().forward(chosen)
        return chosen @ self.weight


class Model(nn.Module):
    """Tokens, and with them a picture or a sound: each in some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SoftTable(40, 24)
        self.picture, self.sound = Tower(10, 24), Tower(14, 24)
        self.trunk, self.head = Tower(24, 24), nn.Linear(24, 40)

    def forward(self, ids: Tensor, pixels: Tensor | None = None, wave: Tensor | None = None) -> Tensor:
        x = self.table(ids)
        if pixels is not None:
            x = x + self.picture(pixels)
        if wave is not None:
            x = x + self.sound(wave) + self.table(wave.repeat(1, 1, 3)[..., :40].softmax(-1))
        logits = self.head(x + self.trunk(x))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(kind: str, rows: int = 3, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {"ids": torch.randint(40, (rows, 7), generator=generator)}
    if kind == "picture":
        found["pixels"] = torch.randn(rows, 7, 10, generator=generator)
    if kind == "sound":
        found["wave"] = torch.randn(rows, 7, 14, generator=generator)
    return found


def examples() -> list[dict[str, Any]]:
    return [batch("picture"), batch("sound", rows=2)]


def sharded(example_inputs: Any) -> set[str]:
    plan, _ = make_plan(model(), 2, example_inputs=example_inputs)
    return {p.names[0] for p in plan.parameters if isinstance(p.layout, Shard) and len(p.shape) > 1}


def parity(rank: int, ranks: int) -> None:
    original = model()
    local = parallelize(copy.deepcopy(original), dist.group.WORLD, example_inputs=examples())
    for seed, kind in enumerate(("sound", "picture", "text", "sound"), 1):
        given = batch(kind, seed=seed)
        original.zero_grad()
        local.zero_grad()
        wanted, found = original(**given), local(**given)
        wanted.backward()
        found.backward()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
        gradients = full_gradients(local)
        for name, parameter in original.named_parameters():
            there = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            here = gradients.get(name)
            here = torch.zeros_like(parameter) if here is None else here
            scale = float(there.abs().max()) or 1.0
            torch.testing.assert_close(here, there, rtol=0, atol=1e-5 * scale, msg=f"{kind}: {name}")


def test_what_a_list_of_batches_is() -> None:
    x, y = torch.ones(2), torch.ones(3)
    assert [call.args for call in as_calls([x, y])] == [(x, y)]
    assert [call.args for call in as_calls((x, y))] == [(x, y)]
    assert [(call.args, dict(call.kwargs)) for call in as_calls([(x,), {"y": y}])] == [((x,), {}), ((), {"y": y})]


def test_each_batch_plans_what_it_reaches() -> None:
    towers = {f"{tower}.{part}.weight" for tower in ("picture", "sound") for part in ("up", "down")}
    assert towers & sharded(batch("picture")) == {"picture.up.weight", "picture.down.weight"}
    assert towers <= sharded(examples())


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_every_kind_of_batch_trains_as_in_one_process(ranks: int) -> None:
    run_ranks(parity, ranks)


def test_an_error_names_the_batch() -> None:
    wrong = batch("picture") | {"pixels": torch.ones(3, 7, 11)}
    with pytest.raises(CaptureError, match="number 2 of example_inputs"):
        make_plan(model(), 2, example_inputs=[batch("sound"), wrong])
