"""The options of a plan: one object has them, one docstring describes them, and all that take them take the same."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from jsonargparse import ArgumentParser

from lightning_autotp import AutoTPFabricStrategy, AutoTPStrategy, cli, make_plan, parallelize
from lightning_autotp.lightning.base import AutoTPBase
from lightning_autotp.solving.options import PlanOptions, described_in, documented_by

OPTIONS = {
    name: field
    for name, field in inspect.signature(PlanOptions).parameters.items()
    if name not in ("traced_with", "device")
}

TAKERS: dict[Any, set[str]] = {
    make_plan: {"plan", "plan_cache", "async_tensor_parallel"},  # it makes a plan, and nothing runs
    parallelize: set(),
    AutoTPStrategy: {"profile"},
    AutoTPFabricStrategy: {"profile"},
    cli.plan: {"profile", "plan", "plan_cache", "async_tensor_parallel"},
}
"""What takes options of a plan, with those that it does not take."""

RENAMED = {cli.plan: {"tokens": "tokens_per_step"}}
NARROWER = {
    (AutoTPStrategy, "tokens_per_step"): {int, tuple[int, int], type(None)},
    (AutoTPFabricStrategy, "tokens_per_step"): {int, tuple[int, int], type(None)},
    (cli.plan, "tokens_per_step"): {int, type(None)},
}
"""What fewer types are taken for than the option has."""

OWN_WORDS = {"checked_batches", "checked_steps"}
"""What means something else in the Trainer and in Fabric, and is described by both."""


def taken(taker: Any) -> dict[str, inspect.Parameter]:
    """The options of a plan that something takes, by the plan's names."""
    names = RENAMED.get(taker, {})
    parameters = {names.get(name, name): one for name, one in inspect.signature(taker).parameters.items()}
    return {name: one for name, one in parameters.items() if name in OPTIONS}


def named(takers: Any) -> Any:
    return pytest.mark.parametrize("taker", takers, ids=lambda taker: f"{taker.__module__}.{taker.__name__}")


@named(TAKERS)
def test_all_take_the_same_options_with_the_same_defaults(taker: Any) -> None:
    found = taken(taker)
    assert found.keys() == OPTIONS.keys() - TAKERS[taker]
    wanted, hints = get_type_hints(PlanOptions), get_type_hints(taker.__init__ if inspect.isclass(taker) else taker)
    for name, parameter in found.items():
        assert parameter.default == OPTIONS[name].default, name
        hint, narrower = hints[parameter.name], NARROWER.get((taker, name))
        assert hint == wanted[name] if narrower is None else set(get_args(hint)) == narrower, name


@named([AutoTPStrategy, AutoTPFabricStrategy])
def test_the_strategies_take_the_same(taker: Any) -> None:
    mine, common = inspect.signature(taker).parameters, inspect.signature(AutoTPBase).parameters
    assert list(mine) == list(common)  # by position, too
    assert {name: str(one) for name, one in mine.items()} == {name: str(one) for name, one in common.items()}


def written_in(taker: Any) -> set[str]:
    """The parameters that a docstring describes in its source."""
    source = Path(inspect.getsourcefile(taker) or "").read_text()
    [node] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == taker.__name__
    ]

    def taker_as_written() -> None: ...

    taker_as_written.__doc__ = ast.get_docstring(node)
    return set(described_in(taker_as_written))


def test_an_option_is_described_in_one_place() -> None:
    assert written_in(PlanOptions) == {*OPTIONS, "traced_with", "device"}
    for taker in (*TAKERS, AutoTPBase):
        assert not written_in(taker) & OPTIONS.keys(), taker
    for taker in (AutoTPStrategy, AutoTPFabricStrategy):
        assert written_in(taker) & inspect.signature(AutoTPBase).parameters.keys() == OWN_WORDS
    assert "example_inputs" not in written_in(parallelize)


@named([*TAKERS, AutoTPBase])
def test_help_describes_all_in_order(taker: Any) -> None:
    found = described_in(taker)
    assert list(found) == list(inspect.signature(taker).parameters)
    for name in taken(taker).keys() & found.keys():
        assert found[name] == described_in(PlanOptions)[name]
    for section in ("Returns:", "Raises:"):
        assert inspect.cleandoc(taker.__doc__).count(section) <= 1


@named([AutoTPStrategy, AutoTPFabricStrategy])
def test_a_configurations_help_describes_all_with_their_defaults(
    taker: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10000")  # no word is broken
    parser = ArgumentParser()
    parser.add_subclass_arguments(AutoTPBase, "strategy")
    with pytest.raises(SystemExit):
        parser.parse_args(["--strategy.help", f"{taker.__module__}.{taker.__name__}"])
    text = " ".join(capsys.readouterr().out.split())
    for name, parameter in inspect.signature(taker).parameters.items():
        description = " ".join(described_in(taker)[name].partition(":")[2].split())
        assert f"--strategy.{name}" in text
        assert description in text, name
        shown = "null" if parameter.default is None else parameter.default
        assert f"default: {shown})" in text.partition(description)[2].partition("--strategy.")[0], name
    chosen = {"class_path": f"lightning_autotp.{taker.__name__}"}
    chosen["init_args"] = {"keep_whole": ["lm_head"], "cut": {"wte": 0}, "tokens_per_step": 64, "memory": 1e9}  # type: ignore[assignment]
    made = taker(**parser.parse_object({"strategy": chosen}).strategy.init_args.as_dict())
    assert made.plan_options == PlanOptions(keep_whole=["lm_head"], cut={"wte": 0}, tokens_per_step=64, memory=1e9)


def test_own_words_stay_and_others_come_in_order() -> None:
    def first(one: int, two: int) -> None:
        """First.

        Args:
            one: of the first.
            two: of the first,
                at length.
        """

    @documented_by(first)
    def second(two: int, one: int, three: int) -> None:
        """Second.

        Args:
            three: of the second.
            one: of the second.

        Raises:
            ValueError: never.
        """

    assert inspect.cleandoc(second.__doc__ or "").splitlines() == [
        "Second.",
        "",
        "Args:",
        "    two: of the first,",
        "        at length.",
        "    one: of the second.",
        "    three: of the second.",
        "",
        "Raises:",
        "    ValueError: never.",
    ]


def test_without_docstrings_nothing_is_described() -> None:
    def taker(plan: str) -> None: ...

    assert documented_by(PlanOptions)(taker) is taker
    assert taker.__doc__ is None


@pytest.mark.parametrize("make", [tuple, list, iter, set], ids=lambda make: make.__name__)
def test_names_may_come_in_anything(make: Callable[[Any], Any]) -> None:
    options = PlanOptions(keep_whole=make(["lm_head"]))
    assert list(options.keep_whole) == list(options.keep_whole) == ["lm_head"]
    assert list(PlanOptions(keep_whole="lm_head").keep_whole) == ["lm_head"]


def test_what_was_given_may_change() -> None:
    names, cut = ["lm_head"], {"wte": 0}
    options = PlanOptions(keep_whole=names, cut=cut)
    names.clear()
    cut.clear()
    assert (list(options.keep_whole), options.cut) == (["lm_head"], {"wte": 0})
