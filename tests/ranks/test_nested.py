"""What modules take and return may be of any class that can be opened and closed again."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from compared import assert_same_training
from distributed import run_ranks
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from lightning_autotp.capture.capture import capture
from lightning_autotp.capture.nested import (
    NoSuchPlace,
    copied,
    leaves_of,
    map_leaves,
    opened,
    replaced_at,
    steps_of,
)
from lightning_autotp.parameters.state import parallel_state


class Features(NamedTuple):
    hidden: Tensor
    others: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Tensor
    name: str = "frozen"


@dataclass
class Record:
    """Its ``__init__`` must not run twice."""

    hidden: Tensor
    rest: Any = None
    made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made += 1


@dataclass
class Unkeyed(OrderedDict[str, Any]):
    """As diffusers' outputs: a dataclass that is a dict, registered without keys; ``None`` is left out."""

    first: Any = None
    second: Any = None

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


register_pytree_node(
    Unkeyed,
    lambda it: (list(it.values()), list(it)),
    lambda values, keys: Unkeyed(**dict(zip(keys, values, strict=True))),
)


class Pair:
    """A class of which only torch's pytrees know something."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


register_pytree_node(Pair, lambda it: ([it.left, it.right], None), lambda values, _: Pair(*values))

Point = namedtuple("Point", "x y")


def values() -> dict[str, Any]:
    return {
        "namedtuple": Features(torch.zeros(1), {"a": [torch.zeros(2)]}),
        "frozen": Frozen(torch.zeros(1)),
        "dataclass": Record(torch.zeros(1), (Record(torch.zeros(2)), "text")),
        "unkeyed": Unkeyed(second=torch.zeros(1)),
        "registered": Pair(torch.zeros(1), [torch.zeros(2)]),
        "mapping": UserDict({"it's": torch.zeros(1), 3: torch.zeros(2)}),
        "ordered": OrderedDict(a=Point(torch.zeros(1), 2)),
        "maximum": torch.zeros(2, 2).max(0),
    }


PATHS = {
    "namedtuple": [".hidden", ".others['a'][0]"],
    "frozen": [".hidden", ".name"],
    "dataclass": [".hidden", ".rest[0].hidden", ".rest[0].rest", ".rest[0].made", ".rest[1]", ".made"],
    "unkeyed": ["['second']"],
    "registered": ["[0]", "[1][0]"],
    "mapping": ['["it\'s"]', "[3]"],
    "ordered": ["['a'].x", "['a'].y"],
    "maximum": ["[0]", "[1]"],
}


@pytest.mark.parametrize("name", PATHS)
def test_a_leaf_is_found_again_by_its_path(name: str) -> None:
    value = values()[name]
    found = dict(leaves_of(value))
    assert list(found) == PATHS[name]
    for path, leaf in found.items():
        other = replaced_at(value, steps_of(path), lambda _: "new")
        assert type(other) is type(value)
        assert dict(leaves_of(other)) == {**found, path: "new"}
        assert dict(leaves_of(value))[path] is leaf  # the one that was given is as before
    assert map_leaves(lambda _, leaf: leaf, value) is value
    doubled = map_leaves(lambda path, leaf: (path, leaf) if isinstance(leaf, Tensor) else leaf, value)
    assert type(doubled) is type(value)


def test_what_is_no_container_is_a_leaf() -> None:
    for leaf in (torch.zeros(2).shape, "text", None, nn.Linear(1, 1), Record, torch.zeros(2, 2)):
        assert opened(leaf) is None
    with pytest.raises(NoSuchPlace, match=r"cannot find \[1\] in a tuple"):
        replaced_at((1,), ("[1]",), str)
    around: list[Any] = [1]
    around.append(around)
    assert [path for path, _ in leaves_of(around)] == ["[0]", "[1]"]


def test_what_was_changed_in_a_copy_can_be_put_back() -> None:
    value = ([1], {"a": [2]}, Record(torch.ones(1), [3]), (4,))
    new = map_leaves(lambda _, leaf: leaf + 10 if isinstance(leaf, int) else leaf, value)
    containers = list(copied(value, new))
    assert [container.path for container in containers] == ["[0]", "[1]", "[1]['a']", "[2]", "[2].rest"]
    new[0].append(5)
    new[2].hidden = None
    changed = [container for container in containers if container.is_changed()]
    for container in changed:
        container.put_back()
    assert [container.path for container in changed] == ["[0]", "[2]"]
    assert (value[0], value[1], value[2].hidden) == ([11, 5], {"a": [2]}, None)


class Up(nn.Module):
    """Takes a value of one class and returns one of another: layouts change at both."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.weight = nn.Linear(16, 64), kind, nn.Parameter(torch.rand(64))

    def forward(self, given: Any, *, scale: Any) -> Any:
        hidden = self.linear(next(leaf for _, leaf in leaves_of(given))) * self.weight * scale.x
        made = {
            "namedtuple": lambda: Features(hidden, {"a": [None]}),
            "frozen": lambda: Frozen(hidden),
            "dataclass": lambda: Record(hidden, [Frozen(hidden)]),
            "unkeyed": lambda: Unkeyed(second=hidden),
            "registered": lambda: Pair(hidden, 3),
            "mapping": lambda: UserDict(hidden=hidden),
        }
        return made[self.kind]()


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 16)

    def forward(self, given: Any) -> Any:
        return Unkeyed(second=self.linear(next(leaf for _, leaf in leaves_of(given)).cumsum(-1)))


class Passing(nn.Module):
    """Two modules, between which nothing is a plain tensor; the second one needs it whole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = Up(kind), Down()

    def forward(self, given: Any) -> Any:
        return Record(self.down(self.up(given, scale=Point(2.0, None))).second.tanh())


KINDS = ("namedtuple", "frozen", "dataclass", "unkeyed", "registered", "mapping")


def every_kind(rank: int, world_size: int) -> list[set[str]]:
    keys = []
    for kind in KINDS:
        torch.manual_seed(0)
        model = Passing(kind)
        batch = values()[kind]
        batch = map_leaves(lambda path, leaf: torch.randn(5, 16) if isinstance(leaf, Tensor) else leaf, batch)
        cut = {"up.linear.weight": 0, "up.weight": 0}
        local = assert_same_training(model, (batch,), lambda result: result.hidden.square().mean(), cut=cut)
        plan = parallel_state(local).plan
        keys.append({f"{change.module}.{change.side}{change.key}" for change in plan.conversions})
    return keys


def test_loss_and_gradients_whatever_modules_take_and_return() -> None:
    first, second = run_ranks(every_kind, 2)
    assert first == second
    at = (".hidden", ".hidden", ".hidden", "['second']", "[0]", "['hidden']")
    for key, found in zip(at, first, strict=True):
        assert found & {f"up.out{key}", f"down.in[0][0]{key}"}


class Appending(nn.Module):
    """A child that changes what it is given, instead of returning anything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, state: Any, seen: list[Tensor]) -> None:
        state.hidden = self.linear(state.hidden)
        seen.append(state.hidden)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Appending(), Appending()

    def forward(self, x: Tensor) -> Tensor:
        state, seen = Record(x), [x]
        self.first(state, seen)
        state.hidden = state.hidden.relu()
        self.second(state, seen)
        return torch.stack(seen).sum(0) + state.hidden


def changing_arguments(rank: int, world_size: int) -> float:
    torch.manual_seed(0)
    local = assert_same_training(Stateful(), (torch.randn(5, 16),), lambda result: result.square().mean())
    return parallel_state(local).plan.sharded_fraction


def test_who_gives_a_container_sees_what_a_module_changes_in_it() -> None:
    graph = capture(Stateful(), torch.zeros(5, 16))
    assert [operator.name for operator in graph.operators].count("aten.linear.default") == 2
    (stacked,) = [operator for operator in graph.operators if operator.name == "aten.stack.default"]
    assert len(set(stacked.inputs)) == 3
    boundaries = {str(operator.boundary) for operator in graph.operators if operator.boundary}
    assert "first.in[0][0].hidden" not in boundaries
    assert "first.linear.in[0][0]" in boundaries
    assert all(fraction > 0.9 for fraction in run_ranks(changing_arguments, 2))
