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
import re
from datetime import date
from pathlib import Path

import pytest
from combination_drivers import one_process
from combination_runs import Verdict, differences, exported_otherwise, tried
from combination_task import adapted_model
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


KEPT = [
    f"llama {sizes} checkpointing={kept} {other}"
    for sizes in ("tensor_ranks=3", "copies=2")
    for kept in ("blocks", "offload", "auto")
    for other in ("compile=blocks", "resume=to-one-process", "resume=from-one-process optimizer=AdamW")
    if (kept, other) != ("auto", "compile=blocks")  # which no step is rehearsed of
]
OFFLOADED = [
    f"{run} {sizes} offload=True"
    for sizes in ("tensor_ranks=3", "copies=2")
    for run in ("gpt2 resume=to-one-process clip=norm", "llama resume=from-one-process accumulate=2")
]


@pytest.mark.nightly
def test_a_compiled_model_of_several_copies_is_evaluated() -> None:
    text = "mpt copies=2 driver=fabric precision=bf16-mixed loss=z-loss compile=whole evaluation=batch"
    check(tried(given(text)))


@pytest.mark.nightly
def test_a_batch_may_have_as_many_pictures_as_a_rank_has_of_the_planned_one() -> None:
    check(tried(given("convnext shapes=rows sequence_parallel=yes")))


@pytest.mark.nightly
@pytest.mark.parametrize("text", [*KEPT, *OFFLOADED])
def test_what_saves_memory_goes_with_other_sizes_and_compiled_blocks(text: str) -> None:
    check(tried(given(text)))


@pytest.mark.parametrize(
    "text",
    [
        "llama-uneven precision=float64 padded=True shapes=tokens frozen=half groups=2 schedule=True accumulate=2"
        " clip=norm sequence_parallel=yes checkpointing=blocks averaging=True evaluation=epoch export=run",
        pytest.param(
            "llama-one-key driver=fabric padded=True shapes=rows adapter=dora groups=2 schedule=True accumulate=2"
            " clip=value checkpointing=blocks evaluation=epoch generates=True resume=directory export=run",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_many_options_at_once_equal_one_process(text: str) -> None:
    check(tried(given(text)))


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
        ("llama generates=True", "text is written in an evaluation"),
    ],
)
def test_what_cannot_be_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        given(text)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_mistake_in_any_of_the_results_is_found(precision: str, tmp_path: Path) -> None:
    combination = Combination(precision=precision, evaluation="epoch", generates=True)
    wanted, *noisy = (one_process(combination, tmp_path / str(noise), noise) for noise in range(3))
    assert not differences(combination, [wanted, wanted], wanted, noisy)
    name, weight = "model.model.layers.0.mlp.up_proj.weight", 1.5
    for kind, place in (("losses", 1), ("evaluated", 0), ("gradients", 1), ("written", 0), ("after", name)):
        wrong = copy.deepcopy(wanted)
        if kind == "gradients":
            wrong[kind][place][name] *= weight
        elif kind == "written":
            tokens, logits = wrong[kind][place][0]
            wrong[kind][place] = [(tokens, logits * weight)]
        elif kind == "after":
            wrong[kind][name] += (wrong[kind][name] - wanted["before"][name]) * (weight - 1)
        else:
            wrong[kind][place] *= weight
        ranks = [wanted, wrong] if kind != "losses" else [wrong, wrong]
        found = differences(combination, ranks, wanted, noisy)
        assert any(("of model" not in text or name in text) for text in found), kind


def test_another_token_is_found_where_it_is_the_first_that_differs(tmp_path: Path) -> None:
    combination = Combination(evaluation="epoch", generates=True)
    wanted, *noisy = (one_process(combination, tmp_path / str(noise), noise) for noise in range(3))
    for row, at in ((0, 0), (2, 3)):
        wrong = copy.deepcopy(wanted)
        wrong["written"][1][0][0][row, at] += 1
        (found,) = differences(combination, [wanted, wrong], wanted, noisy)
        assert found.startswith("rank 1: text 1 is ")


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_mistake_in_a_file_is_found(adapter: str, tmp_path: Path) -> None:
    combination = Combination(export="run", adapter=adapter)
    model = adapted_model(combination, tmp_path)
    model.save_pretrained(tmp_path / "exported")
    state = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    assert not exported_otherwise(combination, tmp_path, state)
    kind = "lora_A" if adapter == "lora" else "norm"
    state[next(name for name in state if kind in name)].view(-1)[0] += 1e-6
    found = exported_otherwise(combination, tmp_path, state)
    assert re.match(r"exported (adapter_)?model.safetensors is [0-9a-f]+, not [0-9a-f]+$", found)
