r"""Options of all kinds at once, drawn at random, other ones every day: each run against one process.

``COMBINATIONS`` names others instead, by their seeds or as they are written, with semicolons between them::

    COMBINATIONS="739948000; llama tensor_ranks=3 clip=norm" \
        make test-nightly ARGS=tests/end_to_end/test_combinations.py

A test that fails ends with the line that runs it again, and the one that looks for the simplest combination that
fails.
"""

from __future__ import annotations

import copy
import os
from datetime import date
from pathlib import Path

import pytest
from combination_runs import Verdict, differences, tried
from combination_task import one_process
from combinations import CHOICES, FAMILIES, Combination, drawn, given

A_DAY = 16
"""How many combinations, of less than half a minute each as a rule."""
VARIABLE = "COMBINATIONS"


def todays() -> list[Combination]:
    """Those that are asked for, or the day's."""
    if asked := os.environ.get(VARIABLE):
        return [drawn(int(text)) if text.strip().isdigit() else given(text) for text in asked.split(";")]
    return [drawn(date.today().toordinal() * 1000 + number) for number in range(A_DAY)]


def check(verdict: Verdict) -> None:
    if verdict.outcome == "unclear":
        pytest.skip(verdict.reason)
    text = str(verdict.combination)
    assert verdict.is_right, (
        f"{text}: {verdict.outcome}\n{verdict.reason}\n"
        f'again: {VARIABLE}="{text}" make test-nightly ARGS={Path(__file__).relative_to(Path.cwd())}\n'
        f'the simplest: PYTHONPATH=.:tools python tests/support/simplest_combination.py "{text}"'
    )


@pytest.mark.nightly
@pytest.mark.parametrize("combination", todays(), ids=str)
def test_a_combination_equals_one_process(combination: Combination) -> None:
    check(tried(combination))


def test_many_options_at_once_equal_one_process() -> None:
    check(
        tried(
            given(
                "llama-uneven precision=float64 padded=True shapes=tokens frozen=half groups=2 schedule=True"
                " accumulate=2 clip=norm sequence_parallel=yes checkpointing=blocks averaging=True evaluation=epoch"
            )
        )
    )


def test_what_is_drawn_is_read_as_it_is_written() -> None:
    combinations = [drawn(seed) for seed in range(600)]
    assert {combination.family for combination in combinations} == FAMILIES.keys()
    for name, values in CHOICES.items():
        assert {getattr(combination, name) for combination in combinations} == values.keys()
    for combination in combinations:
        assert given(str(combination)) == combination
        for simpler in combination.simpler():
            assert given(str(simpler)) == simpler


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lama clip=norm", "lama is none of the families"),
        ("llama clip=norms", "clip may be none, norm, value"),
        ("llama clips=norm", "there is no such option"),
        ("vit loss=smoothed", "only language models have a loss of logits"),
    ],
)
def test_what_cannot_be_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        given(text)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_mistake_in_any_of_the_results_is_found(precision: str, tmp_path: Path) -> None:
    combination = Combination(precision=precision, evaluation="epoch")
    wanted, *noisy = (one_process(combination, tmp_path / str(noise), noise) for noise in range(3))
    assert not differences(combination, [wanted, wanted], wanted, noisy)
    name, weight = "model.model.layers.0.mlp.up_proj.weight", 1.5
    for kind, place in (("losses", 1), ("evaluated", 0), ("gradients", 1), ("after", name)):
        wrong = copy.deepcopy(wanted)
        if kind == "gradients":
            wrong[kind][place][name] *= weight
        elif kind == "after":
            wrong[kind][name] += (wrong[kind][name] - wanted["before"][name]) * (weight - 1)
        else:
            wrong[kind][place] *= weight
        ranks = [wanted, wrong] if kind != "losses" else [wrong, wrong]
        found = differences(combination, ranks, wanted, noisy)
        assert any(("of model" not in text or name in text) for text in found), kind
