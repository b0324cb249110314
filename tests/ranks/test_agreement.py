"""Errors reach every rank, and different weights are found, without a hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks
from outcomes import outcome
from torch import nn

from lightning_autotp.optimizers.scaler import AgreedGradScaler
from lightning_autotp.ranks.agreement import (
    PeerError,
    Raised,
    check_same_weights,
    first_makes,
    made_together,
    raise_together,
)


def rewritten(error: Exception) -> Exception:
    try:
        raise type(error)("with more words") from error
    except type(error) as made:
        return made


def guard(rank: int, failing: tuple[int, ...], error: type[Exception], text: str = "") -> Any:
    try:
        with raise_together(None, "reading the checkpoint"):
            if rank in failing:
                raise error(text or f"no such file, says {rank}")
    except (OSError, ValueError, PeerError) as caught:
        return Raised.how(rewritten(caught)) if text else (type(caught).__name__, str(caught))
    return None


def exchange(rank: int, failing: str = "") -> Any:
    """What the ranks make for each other inside of a phase, in which rank 1 fails somewhere, or the first rank does."""

    def made(where: str, by: int = 1) -> int:
        if failing == where and rank == by:
            raise ValueError(f"{where} fails")
        return 10 + rank

    try:
        with raise_together(None, "proving"):
            made("before")
            all_of_them = made_together(None, "looking", lambda: made("inside"))
            first = first_makes(None, "tracing", lambda: made("first", by=0))
            made("after")
            return all_of_them, first
    except (ValueError, PeerError) as caught:
        return type(caught).__name__, str(caught)


GRADIENTS: tuple[tuple[float | None, ...], ...] = (
    (4.0, None, 4.0),
    (4.0, None, torch.inf),
    (None, torch.inf, None),
    (None, 2.0, None),
    (None, None, None),
)
"""Of each rank in each step."""


def scaled_steps(rank: int) -> list[tuple[float, float] | str]:
    """A parameter and the scale after each step, for gradients of which a rank may have none."""
    scaler = AgreedGradScaler(torch.amp.GradScaler("cpu", init_scale=4.0))
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    seen: list[tuple[float, float] | str] = []
    for gradient in [step[rank] for step in GRADIENTS]:
        parameter.grad = None if gradient is None else torch.full((1,), gradient)
        scaler.scale(torch.ones(()))
        try:
            scaler.step(optimizer)
        except AssertionError as error:
            seen.append(str(error))
            continue
        scaler.update()
        seen.append((parameter.item(), scaler.get_scale()))
    return seen


def on_every_rank(rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    seen["one fails"] = guard(rank, (1,), FileNotFoundError)
    seen["two fail"] = guard(rank, (0, 2), ValueError)
    seen["two fail alike"] = guard(rank, (1, 2), ValueError, "no such file")
    seen["none fails"] = guard(rank, (), ValueError)
    for failing in ("before", "inside", "first", "after", ""):
        seen[f"exchange {failing}"] = exchange(rank, failing)

    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    seen["same weights"] = outcome(check_same_weights, model, None)
    if rank == 2:
        torch.manual_seed(rank)
        model = nn.Linear(100, 100)
    seen["weights"] = outcome(check_same_weights, model, None)
    seen["meta weights"] = outcome(check_same_weights, nn.Linear(3, 3 + rank, device="meta"), None)
    seen["scaled"] = scaled_steps(rank)
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of three ranks saw."""
    return run_ranks(on_every_rank, 3)


def test_an_error_knows_whether_an_earlier_rank_has_raised_it(ranks: list[dict[str, Any]]) -> None:
    assert [seen["two fail alike"] for seen in ranks] == [None, Raised(1, True, True), Raised(1, False, True)]


def test_the_failing_rank_raises_its_own_error_and_the_others_hear_of_it(ranks: list[dict[str, Any]]) -> None:
    peer = ("PeerError", "rank 1 of 3 failed while reading the checkpoint: FileNotFoundError: no such file, says 1")
    own = ("FileNotFoundError", "no such file, says 1")
    assert [seen["one fails"] for seen in ranks] == [peer, own, peer]


def test_every_failing_rank_is_named(ranks: list[dict[str, Any]]) -> None:
    assert [seen["two fail"][0] for seen in ranks] == ["ValueError", "PeerError", "ValueError"]
    assert ranks[1]["two fail"][1].splitlines() == [
        "rank 0 of 3 failed while reading the checkpoint: ValueError: no such file, says 0",
        "rank 2 of 3 failed while reading the checkpoint: ValueError: no such file, says 2",
    ]


def test_a_phase_that_succeeds_everywhere_is_quiet(ranks: list[dict[str, Any]]) -> None:
    assert [seen["none fails"] for seen in ranks] == [None] * 3


def test_what_ranks_make_reaches_all_of_them(ranks: list[dict[str, Any]]) -> None:
    assert [seen["exchange "] for seen in ranks] == [([10, 11, 12], 10)] * 3


@pytest.mark.parametrize(
    ("failing", "by", "phase"), [("before", 1, "looking"), ("inside", 1, "looking"), ("first", 0, "tracing"),
                                 ("after", 1, "proving")],
)  # fmt: skip
def test_so_does_an_error_wherever_a_rank_has_it(
    failing: str, by: int, phase: str, ranks: list[dict[str, Any]]
) -> None:
    peer = ("PeerError", f"rank {by} of 3 failed while {phase}: ValueError: {failing} fails")
    expected = [("ValueError", f"{failing} fails") if rank == by else peer for rank in range(3)]
    assert [seen[f"exchange {failing}"] for seen in ranks] == expected


def test_a_guard_in_one_process_needs_no_process_group() -> None:
    with raise_together(None, "nothing"):
        pass
    with pytest.raises(KeyError), raise_together(None, "something"):
        raise KeyError("x")
    assert issubclass(PeerError, RuntimeError)


@pytest.mark.parametrize("case", ["same weights", "meta weights"])
def test_what_agrees_passes(ranks: list[dict[str, Any]], case: str) -> None:
    assert [seen[case] for seen in ranks] == [None] * 3


def test_weights_that_differ_are_named_on_every_rank_alike(ranks: list[dict[str, Any]]) -> None:
    [message] = {seen["weights"] for seen in ranks}
    assert message is not None
    assert message.startswith("the ranks built different weights: weight is float32[100, 100] (checksum ")
    assert "on ranks 0, 1 and float32[100, 100] (checksum " in message
    assert "on rank 2. " in message
    assert "What to do: call `seed_everything(seed)`" in message


def test_steps_are_scaled_alike_where_ranks_have_no_gradients(ranks: list[dict[str, Any]]) -> None:
    nobody = "No inf checks were recorded for this optimizer."  # as in one process
    some = [(-1.0, 4.0), (-1.0, 2.0), (-1.0, 1.0), (-1.0, 1.0), nobody]
    assert [seen["scaled"] for seen in ranks] == [
        some,
        [(0.0, 4.0), (0.0, 2.0), (0.0, 1.0), (-2.0, 1.0), nobody],
        some,
    ]
