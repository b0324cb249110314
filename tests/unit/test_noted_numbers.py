"""Numbers of a trace behave as ordinary ones, and note what code asks of them."""

from __future__ import annotations

import copy
import enum
import itertools
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_stand_ins import flash_attn_func, module
from torch import Tensor, nn

from lightning_autotp.capture.capture import ExampleCall, capture
from lightning_autotp.capture.noted_numbers import NotedFloat, NotedInt, Notes, plain
from lightning_autotp.operators.questions import Question
from lightning_autotp.proving.call_kinds import Arguments, Asked, FewValues, Sizes

SEVEN, HALF = "[0][0]", "[0][1]"


class Task(enum.IntEnum):
    SEVEN = 7


@torch.jit.script
def scripted(number: int) -> Tensor:
    return torch.ones(number)


ASKS: dict[str, Callable[[Any, Any], Any]] = {
    "==": lambda n, f: n == 7,
    "turned round": lambda n, f: 29 == n,  # noqa: SIM300
    "!=": lambda n, f: n != 7,
    "<": lambda n, f: n < 8,
    ">= of a float": lambda n, f: n >= 7.5,
    "in": lambda n, f: n in (3, 7, 9),
    "match": lambda n, f: _matched(n),
    "bool": lambda n, f: bool(n),
    "not": lambda n, f: not n,
    "a member of an enumeration": lambda n, f: n == Task.SEVEN,
    "a rest": lambda n, f: n % 4 == 3,
    "divmod": lambda n, f: divmod(n, 4)[1] == 3,
    "computed": lambda n, f: -(3 * n + 1) // 2 < -10,
    "bits": lambda n, f: (n & 4) >> 2 == 1,
    "a power": lambda n, f: 2**n > 100,
    "a quotient": lambda n, f: n / 2 > 3.2,
    "the larger": lambda n, f: max(n, 6) > 8,
    "a float": lambda n, f: f > 0.5,
    "a float, turned round": lambda n, f: 0.5 >= f,  # noqa: SIM300
    "of both": lambda n, f: n * f > 3,
    "the one and the other": lambda n, f: n > f,
}


def _matched(number: int) -> bool:
    match number:
        case 7:
            return True
    return False


@pytest.mark.parametrize("name", ASKS)
def test_a_comparison_is_a_question_that_others_answer_too(name: str) -> None:
    for number, part in ((7, 0.4), (29, 0.9), (0, 0.1), (3, 0.5)):
        notes, ask = Notes(), ASKS[name]
        answer = ask(notes.given(SEVEN, number), notes.given(HALF, part))
        assert answer == ask(number, part)
        assert notes.questions
        assert not notes.told
        for other, others_part in ((7, 0.4), (29, 0.9), (0, 0.1), (3, 0.5), (8, 0.6)):
            asked = [question.answer({SEVEN: other, HALF: others_part}) for question in notes.questions]
            here = [question.answer({SEVEN: number, HALF: part}) for question in notes.questions]
            if asked == here:  # the code goes the same way
                assert ask(other, others_part) == answer


ORDINARY: dict[str, Callable[[Any], Any]] = {
    "range": lambda n: list(range(n)),
    "an element": lambda n: list("abcdefgh")[n],
    "a slice": lambda n: list("abcdefgh")[-n:],
    "a key": lambda n: {7: "seven"}[n],
    "a member of a set": lambda n: n in {7},
    "its class": lambda n: (isinstance(n, int), isinstance(n, bool)),
    "text": lambda n: (f"{n:03d}", str(n), repr(n)),
    "an ordinary one": lambda n: (int(n), type(int(n)), float(n)),
    "a copy": lambda n: (copy.copy(n), copy.deepcopy(n), pickle.loads(pickle.dumps(n))),
    "a power with a modulus": lambda n: pow(n, 2, 5),
    "something else": lambda n: (n == "7", n is None, n != None),  # noqa: E711
    "a module of a list": lambda n: nn.ModuleList([nn.Identity()] * 6 + [nn.Tanh(), nn.ReLU()])[n].__class__,
    "a view": lambda n: torch.ones(7, 4).view(n, -1).shape,
    "sizes": lambda n: torch.zeros(n, 2 * n, dtype=torch.int).shape,
    "a dim": lambda n: torch.ones(2, 3).sum(n - 6).shape,
    "an index": lambda n: torch.arange(9)[n].item(),
    "a list as an index": lambda n: torch.arange(9)[[n, 1]].tolist(),
    "indices": lambda n: torch.arange(9)[n:, None].shape,
    "narrow": lambda n: torch.arange(9).narrow(0, 1, n).shape,
    "split": lambda n: [len(part) for part in torch.arange(9).split([n, 2])],
    "a factor": lambda n: (torch.ones(2) * n, n * torch.ones(2), n - torch.ones(2))[1].tolist(),
    "compared with a tensor": lambda n: (n == torch.tensor([7, 8]), torch.tensor([7, 8]) > n)[0].tolist(),
    "a tensor": lambda n: (torch.tensor(n).dtype, torch.tensor([n, 1]).tolist(), torch.full((n,), n).sum().item()),
    "a scripted function": lambda n: scripted(n).shape,
    "a size compared": lambda n: torch.ones(7).shape[0] == n,
}


@pytest.mark.parametrize("name", ORDINARY)
def test_it_is_an_integer_to_everything(name: str) -> None:
    assert ORDINARY[name](Notes().given(SEVEN, 7)) == ORDINARY[name](7)


def test_what_is_asked_of_a_float_but_comparisons_tells_its_value() -> None:
    for tell in (round, int, hash, str, lambda f: f"{2 * f:.1f}", lambda f: {f: 1}, lambda f: sum([f] * 100) > 3):
        notes = Notes()
        tell(notes.given(HALF, 0.5))  # type: ignore[operator]
        assert notes.told == {HALF}
    notes = Notes()
    assert type(notes.given(SEVEN, 7) / 2) is NotedFloat
    assert type(notes.given(HALF, 0.5) // 2) is NotedFloat
    assert type(abs(-notes.given(SEVEN, 7))) is NotedInt
    assert not notes.told
    assert type(plain(notes.given(SEVEN, 7))) is int
    assert plain(True) is True


def test_a_question_without_an_answer_has_none() -> None:
    rest = Question("eq", (Question("mod", (8, SEVEN)), 1))
    assert rest.answer({SEVEN: 7}) is True
    assert rest.answer({SEVEN: 0}) is None
    assert rest.answer({}) is None


class Asking(nn.Module):
    """Asks of numbers at every depth, and keeps one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), 0

    def forward(self, x: Tensor, task: int, options: dict[str, list[int]], strength: float = 0.0) -> Tensor:
        self.kept = task
        if task == 29 or options["lengths"][1] > 5 or strength > 0.5 or self.kept < 0:
            return x
        heads = self.linear(x)[:, [task, task + 1]].unflatten(-1, (2, 2))
        out: Tensor = flash_attn_func(heads, heads, heads, softmax_scale=strength, window_size=(task, 0))
        return out * strength


def test_a_trace_has_the_questions_and_ordinary_numbers() -> None:
    call = ExampleCall((torch.ones(2, 4, 4), 1, {"lengths": [1, 2]}), {"strength": 0.1})
    module("flash_attn", flash_attn_func=flash_attn_func)
    try:
        graph = capture(Asking(), call)
    finally:
        del sys.modules["flash_attn"]
    assert list(graph.questions) == [
        Question("eq", ("[0][1]", 29)),
        Question("gt", ("[0][2]['lengths'][1]", 5)),
        Question("gt", ("[1]['strength']", 0.5)),
        Question("lt", ("[0][1]", 0)),
    ]
    assert graph.numbers == set()
    assert list(graph.settings[""]) == ["kept"]
    leaves = [leaf for call in graph.calls for leaf in call.arguments] + [
        value for _, value in graph.runs[-1].constants
    ]
    arguments = {name: value for operator in graph.operators for name, value in operator.arguments}
    assert arguments["window_size"] == (1, 0)
    leaves += [arguments["softmax_scale"], *arguments["window_size"]]
    assert {type(leaf) for leaf in leaves} & {NotedInt, NotedFloat} == set()


@dataclass
class Options:
    task: int
    sizes: tuple[int, ...]


def test_integers_are_told_by_where_they_are_and_those_of_lists_together() -> None:
    given = (torch.ones(2), 3, [4, [5, {"a": 6}]]), {"task": {"is": 7, "no": True}, "more": Options(8, (9, 10))}
    with torch.no_grad():
        told = Arguments(ExampleCall(*given)).integers
    assert told == {"[1]": [3], "[2]": [4, 5, 6], "task['is']": [7]}
    assert Arguments(ExampleCall(*given)).integers == told | {"more.task": [8], "more.sizes": [9, 10]}

    def kind_of(value: Any) -> Any:
        return Arguments(ExampleCall((value,), {})).kind

    assert kind_of([[1, 0], 3]) != kind_of([[1, 3], 3]) == kind_of([[1, 4], 5])
    assert kind_of([0, 1, 2, 3, 4]) == kind_of([4, 3, 2, 1, 0]) != kind_of([4, 3, 2, 1])


def test_answers_are_exact_for_a_number_and_few_for_a_list() -> None:
    asked = Asked()
    asked.heed([Question("eq", ("[0][0]", number)) for number in range(20)], [1])
    found = {asked.answers(ExampleCall((number,), {})) for number in range(100)}
    assert len(found) == 21
    lengths = [f"[0][0][{at}]" for at in range(9)]
    asked = Asked()
    asked.heed([Question("lt", pair) for pair in itertools.pairwise(lengths)], [1])
    found = {
        asked.answers(ExampleCall(([number >> at & 1 for at in range(9)],), {})) for number in range(1 << len(lengths))
    }
    assert 16 <= len(found) <= 16 + 5
    asked.heed([Question("eq", ("[1]['strength']", number / 100)) for number in range(100)], [1])
    assert asked.untold == {"[1]['strength']"}


def test_the_first_sizes_are_looked_at_one_by_one() -> None:
    sizes, few = Sizes(), FewValues()
    for size in (1, 511):
        sizes.add((size,))
    looked = []
    for size in range(3, 400, 2):
        if not sizes.have((size,), few.told("sizes", (size,)) == (size,)):
            sizes.add((size,))
            looked.append(size)
    assert looked == [*range(3, 3 + 2 * 16, 2), 3 + 2 * 31, 3 + 2 * 63, 3 + 2 * 127]
    assert sizes.have((7,), True)
    assert not sizes.have((513,), False)
    assert not sizes.have((40,), False)
    assert [few.told("task", number) == number for number in range(40)] == [True] * 16 + [
        number == 31 for number in range(16, 40)
    ]
