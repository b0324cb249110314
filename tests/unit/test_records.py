"""What an operator's record says besides its rule, against the operator itself. The cases are those of the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import rule_cases  # noqa: F401 (the cases register themselves)
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_draws import CASES, Draw, for_examples, rare_at_night
from rule_truth import FOR_GPUS, MEANT, Tape, overload, run
from torch import Tensor, nn

from lightning_autotp.capture.capture import capture
from lightning_autotp.operators import (
    Record,
    Shapes,
    functional,
    known_operators,
    operator,
    record,
    records,
    updated,
)
from lightning_autotp.operators.graph import EXPERTS, KEPT, KERNEL_LINEAR_LOSS, KERNEL_LOSS, Operator, refs

NOT_TORCH_S = "boundary", EXPERTS, KEPT, KERNEL_LOSS, KERNEL_LINEAR_LOSS

MANY = 100
"""Examples. Tests of one fact of many operators take the first of them, and all at night, or where it is rare."""
first_or_all = pytest.mark.parametrize("examples", [6, pytest.param(MANY, marks=pytest.mark.nightly)])


def having(fact: Callable[[Record], Any]) -> list[str]:
    return [known.name for known in records() if fact(known)]


def each(
    name: str, check: Callable[[Tape, Operator, dict[str, Any], list[Tensor]], object], examples: int
) -> Counter[Any]:
    """Check an operator's calls, given what they are made with and give; how often the check returned what."""
    seen: Counter[Any] = Counter()

    def one(draw: Draw, _: Any) -> None:
        called = draw.tape.last(name)
        arguments = draw.tape.arguments(called)
        seen[check(draw.tape, called, arguments, run(name, arguments))] += 1

    for_examples(name, one, examples)
    return seen


def holds(name: str, check: Callable[[Tape, Operator, dict[str, Any], list[Tensor]], bool], examples: int) -> bool:
    """Whether a check of an operator's calls was about any of them: of many, where it is about none of the first."""
    return any(each(name, check, count)[True] > 0 for count in (examples, MANY))


def first_tensor(arguments: dict[str, Any]) -> Tensor:
    return next(value for value in arguments.values() if isinstance(value, Tensor))


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(left, right, strict=True))


def test_an_unknown_fact_is_refused() -> None:
    with pytest.raises(TypeError, match="flop"):
        operator("aten.unheard_of.default", flop=1)
    assert record("aten.unheard_of.default") is None


@pytest.mark.parametrize("name", [name for name in known_operators() if name not in NOT_TORCH_S])
def test_names_are_those_of_operators_and_their_arguments(name: str) -> None:
    known = record(name)
    schema = {argument.name: str(argument.type) for argument in overload(name)._schema.arguments}
    named = [*known.sizes, known.lends, known.takes, *known.updates, known.updates_if]
    named += [key for offset in known.offsets for key in offset] + [key for share in known.shares for key in share[:2]]
    assert {key for key in named if key} <= schema.keys()
    if known.in_place:
        assert overload(known.in_place)._schema.arguments[0].is_write
    if not any("Tensor" in kind for kind in schema.values()):  # it makes a tensor of numbers alone
        assert callable(getattr(torch, name.split(".")[1]))
    if known.scatter:
        assert [argument.name for argument in overload(known.scatter)._schema.arguments] == [
            "self", "src", *[key for key in schema if key != "self"],
        ]  # fmt: skip


@first_or_all
@pytest.mark.parametrize("name", having(lambda known: known.identity))
def test_identities_give_what_they_are_given(name: str, examples: int) -> None:
    def check(tape: Tape, called: Operator, arguments: dict[str, Any], results: list[Tensor]) -> bool:
        given = first_tensor(arguments)
        is_one = record(name).identity == "always" or results[0].dtype == given.dtype
        assert not is_one or equal([given], results)
        return is_one

    assert holds(name, check, examples)


@first_or_all
@pytest.mark.parametrize("name", having(lambda known: known.reshapes))
def test_reshaping_keeps_elements_and_their_order(name: str, examples: int) -> None:
    def check(tape: Tape, called: Operator, arguments: dict[str, Any], results: list[Tensor]) -> bool:
        given = first_tensor(arguments)
        is_one = results[0].numel() == given.numel()
        assert not is_one or torch.equal(results[0].flatten(), given.flatten())
        return is_one

    assert holds(name, check, examples)


@first_or_all
@pytest.mark.parametrize("name", having(lambda known: known.uniform))
def test_what_is_uniform_is_the_same_at_every_index(name: str, examples: int) -> None:
    def check(tape: Tape, called: Operator, arguments: dict[str, Any], results: list[Tensor]) -> bool:
        shapes = Shapes(called.arguments, called.outputs, tape.shape)
        dims = [dim for dim in range(results[0].ndim) if record(name).uniform(shapes, dim)]
        for dim in dims:
            assert torch.equal(results[0].narrow(dim, 0, 1).expand_as(results[0]), results[0])
        return any(results[0].shape[dim] > 1 for dim in dims)

    assert holds(name, check, examples)


def test_what_is_expanded_is_not_uniform_along_its_own_dims() -> None:
    tape = Tape()
    x = tape.parameter(2, 1)
    tape.call("aten.expand.default", x, [4, 2, 3])
    called = tape.last("aten.expand.default")
    shapes = Shapes(called.arguments, called.outputs, tape.shape)
    assert [record("aten.expand.default").uniform(shapes, dim) for dim in range(3)] == [True, False, True]


@pytest.mark.parametrize("name", rare_at_night(sorted(CASES.keys() - FOR_GPUS.keys())))
def test_operators_write_what_their_records_say_in_place_and_nothing_else(name: str) -> None:
    def check(tape: Tape, called: Operator, arguments: dict[str, Any], results: list[Tensor]) -> bool:
        given = {key: value.detach() for key, value in arguments.items() if isinstance(value, Tensor)}
        before = {key: value.clone() for key, value in given.items()}
        schema = overload(name)._schema.arguments
        overload(name)(
            *[given.get(each.name, arguments[each.name]) for each in schema if not each.kwarg_only],
            **{each.name: given.get(each.name, arguments[each.name]) for each in schema if each.kwarg_only},
        )
        changed = {key for key, value in given.items() if not torch.equal(value.nan_to_num(), before[key].nan_to_num())}
        numbers = [ref.tensor for key in sorted(changed) for ref in refs(called.argument(key))]
        assert sorted(numbers) == sorted(updated(called))
        for key in changed:
            given[key].copy_(before[key])
        return bool(changed)

    seen = each(name, check, MANY if record(name).updates else 4)
    assert not record(name).updates or (seen[True] > 0 and seen[False] > 0)


@first_or_all
@pytest.mark.parametrize("name", having(lambda known: known.lends))
def test_of_what_is_lent_the_values_do_not_matter(name: str, examples: int) -> None:
    def check(tape: Tape, called: Operator, arguments: dict[str, Any], results: list[Tensor]) -> None:
        lent = arguments[record(name).lends]
        for other in (torch.zeros_like(lent), torch.ones_like(lent)):
            assert equal(run(name, arguments | {record(name).lends: other}), results)

    each(name, check, examples)


@first_or_all
@pytest.mark.parametrize("name", having(lambda known: known.takes))
def test_of_what_is_taken_the_values_do_not_tell_how_much(name: str, examples: int) -> None:
    def check(tape: Tape, called: Operator, arguments: dict[str, Any], results: list[Tensor]) -> None:
        taken = arguments[record(name).takes]
        assert run(name, arguments | {record(name).takes: torch.zeros_like(taken)})[0].shape == results[0].shape

    each(name, check, examples)


def in_place_forms() -> dict[str, str]:
    """Every operator of ATen that returns the tensor that it writes, by its name."""
    forms: dict[str, str] = {}
    for qualified in torch._C._dispatch_get_all_op_names():
        space, _, rest = qualified.partition("::")
        packet, _, kind = rest.partition(".")
        if space == "aten" and packet.endswith("_") and not packet.startswith("_foreach"):
            name = f"aten.{packet}.{kind or 'default'}"
            forms[name] = functional(name)
    return forms


def test_the_functional_form_takes_the_same_arguments() -> None:
    """PyTorch's naming leads to another operator for some: ``pow_.Scalar`` is not ``pow.Scalar``. Records say so."""
    wrong = []
    for name, form in in_place_forms().items():
        if record(form) is not None:
            ours, theirs = (overload(one)._schema.arguments for one in (name, form))
            if [str(argument.type) for argument in ours] != [str(argument.type) for argument in theirs]:
                wrong.append((name, form))
    assert not wrong


def test_what_only_views_otherwise_in_place_is_followed() -> None:
    """All but what lays a tensor over other memory: that changes more than the places of its numbers."""
    views = {name: form for name, form in in_place_forms().items() if torch.Tag.inplace_view in overload(name).tags}
    unknown = {name for name, form in views.items() if record(form) is None}
    assert {name.split(".")[1] for name in unknown} == {"as_strided_", "resize_", "resize_as_", "set_"}


WRITTEN = {
    name: form
    for name, form in in_place_forms().items()
    if record(form) is not None and form not in MEANT
    and torch.Tag.inplace_view not in overload(name).tags  # those write no numbers
}  # fmt: skip


@first_or_all
@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_an_operator_writes_what_its_functional_form_returns(name: str, examples: int) -> None:
    def check(tape: Tape, called: Operator, arguments: dict[str, Any], results: list[Tensor]) -> bool:
        schema = overload(name)._schema.arguments
        values = list(arguments.values())
        given = values[0]
        if given.shape != results[0].shape or not torch.can_cast(results[0].dtype, given.dtype):
            return False
        written = given.clone()
        overload(name)(
            written,
            *(value for value, argument in list(zip(values, schema, strict=True))[1:] if not argument.kwarg_only),
            **{a.name: value for value, a in zip(values, schema, strict=True) if a.kwarg_only},
        )
        assert equal([written], [results[0].to(given.dtype)])
        return True

    assert holds(WRITTEN[name], check, examples)


@first_or_all
@pytest.mark.parametrize("name", having(lambda known: known.scatter))
def test_writing_through_a_view(name: str, examples: int) -> None:
    def check(tape: Tape, called: Operator, arguments: dict[str, Any], results: list[Tensor]) -> None:
        written = arguments["self"].clone()
        src = torch.rand_like(results[0])
        run(name, arguments | {"self": written})[0].copy_(src)
        assert equal(run(record(name).scatter, arguments | {"src": src}), [written])

    each(name, check, examples)


@settings(max_examples=40)
@given(st.tuples(*[st.integers(1, 3)] * 4), st.sampled_from([(2, 3), (2, 2), (3, 2), (3, 3)]))
def test_shape_of_a_grouped_product(sizes: tuple[int, ...], ranks: tuple[int, int]) -> None:
    """What the kernel gives for fp32 on the CPU, which PyTorch's own shape function refuses."""
    experts, m, k, n = sizes[0], 4 * sizes[1], 4 * sizes[2], 4 * sizes[3]
    left = (experts, m, k) if ranks[0] == 3 else (m, k)
    right = (experts, k, n) if ranks[1] == 3 else (k, n)
    length = {(2, 3): m, (2, 2): k, (3, 2): n}.get(ranks, 0)
    ends = torch.tensor([length] * experts, dtype=torch.int32) if length else None
    given = torch.rand(left), torch.rand(right)
    wanted = torch._grouped_mm(*given, offs=ends)

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Parameter(given[0])

        def forward(self, right: Tensor) -> Tensor:
            return torch._grouped_mm(self.left, right, offs=ends)

    graph = capture(Grouped(), given[1])
    assert graph.tensors[graph.outputs[0]].shape == wanted.shape
    assert graph.tensors[graph.outputs[0]].dtype == "float32"
