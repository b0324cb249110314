"""What a training step takes, in a line, and what is said where it is not what was predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_autotp.lightning.step_report import StepReport

REPORT = StepReport(
    memory_predicted=10 * 2**30,
    memory_measured=11 * 2**30,
    seconds_predicted=0.4,
    seconds_measured=0.44,
    machine="H100",
)


def test_the_line_has_both_and_how_far_they_are_apart() -> None:
    wanted = "memory 10.0 GiB predicted, 11.0 GiB measured (+10%); step 400 ms predicted, 440 ms measured (+10%)"
    assert str(REPORT) == wanted
    assert REPORT.warnings == ()


def test_what_is_not_known_is_said() -> None:
    found = replace(REPORT, memory_measured=None, seconds_predicted=None, unknown="the machine is not known")
    wanted = "memory 10.0 GiB predicted, not measured; step not predicted, 440 ms measured (the machine is not known)"
    assert str(found) == wanted
    assert found.warnings == ()


@pytest.mark.parametrize(("measured", "said"), [(0.6, "50% more time than predicted for H100"), (0.2, "50% less time")])
def test_a_fifth_off_is_a_warning(measured: float, said: str) -> None:
    (warning,) = replace(REPORT, seconds_measured=measured).warnings
    assert said in warning
    (warning,) = replace(REPORT, memory_measured=15 * 2**30).warnings
    assert "50% more memory than predicted" in warning
