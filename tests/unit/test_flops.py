"""FLOPs of every product, against PyTorch's own counter and against a count of what a definition computes."""

from __future__ import annotations

import pytest
import rule_cases  # noqa: F401 (the cases register themselves)
from flop_counts import counted_by_torch, prove_flops
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_truth import Tape

from lightning_autotp.operators import count_flops, records
from lightning_autotp.operators.graph import EXPERTS, KERNEL_LINEAR_LOSS

# Of experts, tests/ranks/test_whole_experts.py counts them, and of a kernel's loss tests/unit/test_kernels_from_hub.py.
PRODUCTS = [known.name for known in records() if known.flops and known.name not in (EXPERTS, KERNEL_LINEAR_LOSS)]


@pytest.mark.parametrize("examples", [15, pytest.param(40, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_flops(name: str, examples: int) -> None:
    prove_flops(name, examples)


@settings(max_examples=60)
@given(st.data())
def test_an_einsum_multiplies_in_the_order_of_its_path(data: st.DataObject) -> None:
    equation = data.draw(
        st.sampled_from(["ij,jk,kl->il", "ij,jk,kl", "abc,cd,ad->b", "i,ij,jk,kl->l", "ab,bc,cd,de->"])
    )
    terms = equation.split("->")[0].split(",")
    sizes = {letter: data.draw(st.integers(2, 7)) for letter in sorted({*equation} - {*",->"})}
    path: list[int] = []
    for left in range(len(terms), 1, -1):
        path += data.draw(st.permutations(range(left)))[:2]
    tape = Tape()
    operands = [tape.parameter(*(sizes[letter] for letter in term)) for term in terms]
    tape.call("aten.einsum.default", equation, operands, path=data.draw(st.sampled_from([None, path])))
    called = tape.last("aten.einsum.default")
    assert count_flops(called, tape.shape) == counted_by_torch(called.name, tape.arguments(called)) > 0


def test_tokens_scale_the_flops_of_a_layer() -> None:
    """As a plan is priced for another number of tokens: their dim by a factor, in what is read and in what is made."""
    tape = Tape()
    x, weight = tape.parameter(2, 5, 6), tape.parameter(4, 6)
    tape.call("aten.linear.default", x, weight)
    called = tape.last("aten.linear.default")

    def longer(tensor: int) -> tuple[float, ...]:
        return tuple(size * 2.5 if size == 5 else size for size in tape.shape(tensor))

    assert count_flops(called, longer) == 2.5 * count_flops(called, tape.shape) == 2.5 * 2 * 2 * 5 * 6 * 4


def test_what_is_no_product_has_no_flops() -> None:
    tape = Tape()
    x = tape.parameter(2, 5)
    for name in ("aten.mul.Tensor", "aten.add.Tensor"):
        tape.call(name, x, x)
        assert count_flops(tape.last(name), tape.shape) == 0
