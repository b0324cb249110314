"""A rehearsal runs few of a model's repeated blocks: what the others do is what one that is alike did, once more.

Of blocks that follow each other and are alike, or of groups of them (four with linear attention, one with another), the
first three are run and the last one. For each of the others, what the third did is put into what the step did, in the
forward pass after it and in the backward pass before it. So nothing is extrapolated but the sequence: what is alive at
each moment is counted along all of it.

That is right where the step of such a model is the same sequence over and over, which is seen in the rehearsal: the
third did exactly what the second did, both ways; each block that is left out runs the same operators in its forward
pass, on operands of the same shapes, and autograd has the same to do for it; it gets nothing that is differentiated
elsewhere; and in the end nothing is left of what it had. Else :class:`NotAlike` is raised, and all have to be run. That
blocks run the same operators is not asked again of a model of which it is known, and which only keeps less of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_autotp.building.repeated_blocks import blocks_of_their_own, repeated_blocks
from lightning_autotp.planning.meter import Change, Held, Meter, Moment, Ran
from lightning_autotp.private.fake_tensors_private import RememberingFakeTensorMode
from lightning_autotp.private.torch_private import own_shape, tree_leaves, tree_map, tree_map_only
from lightning_autotp.quantized.noted import format_of

_Item = TypeVar("_Item")

_FIRST = 3
"""Groups that run before those that are left out: one that may begin in another way, and two that are compared."""


class NotAlike(Exception):
    """Blocks that seemed to be alike did not do the same."""


@dataclass(frozen=True)
class Repeats:
    """Groups of blocks that follow each other, as many blocks in each, those at the same place alike.

    Attributes:
        groups: paths of their blocks.
    """

    groups: Sequence[Sequence[str]]

    @property
    def left_out(self) -> Sequence[Sequence[str]]:
        """Those that are not run."""
        return self.groups[_FIRST:-1]

    @property
    def sample(self) -> Sequence[str]:
        """The one that they are taken to be like."""
        return self.groups[_FIRST - 1]

    def alike(self) -> Iterator[tuple[str, str]]:
        """Each block that is left out, and the one that it is taken to be like."""
        for group in self.left_out:
            yield from zip(group, self.sample, strict=True)


def repeats_of(model: nn.Module) -> list[Repeats]:
    """Of each list of blocks the groups that leave out the most of them."""
    own = set(blocks_of_their_own(model))
    paths = {module: path for path, module in model.named_modules()}
    lists: dict[str, list[nn.Module]] = {}
    for block in repeated_blocks(model):
        lists.setdefault(paths[block].rpartition(".")[0], []).append(block)
    found = []
    for blocks in lists.values():
        known: list[Any] = []
        kinds = [_number(_kind(block) if block in own else block, known) for block in blocks]
        start, size, count = max(_runs(kinds), key=lambda run: run[1] * (run[2] - _FIRST - 1), default=(0, 1, 0))
        if count > _FIRST + 1:
            starts = range(start, start + size * count, size)
            found.append(Repeats([[paths[block] for block in blocks[at : at + size]] for at in starts]))
    return found


def _number(kind: Any, known: list[Any]) -> int:
    """Which of the kinds that are known it is; it is known from now on."""
    if kind not in known:
        known.append(kind)
    return known.index(kind)


def _runs(kinds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where groups of the same kinds follow each other: the first block's number, blocks in a group, groups."""
    for size in range(1, len(kinds) // (_FIRST + 2) + 1):
        start = 0
        for at in range(size, len(kinds) + 1):
            if at == len(kinds) or kinds[at] != kinds[at - size]:
                yield start, size, (at - start) // size
                start = at - size + 1


def _kind(block: nn.Module) -> Any:
    """Equal for blocks that may be alike: what they consist of, and how that is set."""

    def of(module: nn.Module) -> Any:
        said = [(name, x) for name, x in vars(module).items() if isinstance(x, str | bool | None)]
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        return type(module), said, [(name, type(x), *_metadata(x), format_of(x)) for name, x in tensors]

    return [(path, *of(module)) for path, module in block.named_modules()]


def _metadata(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


class RanStep(NamedTuple):
    """A forward and backward pass.

    Attributes:
        changes: of memory.
        ran: operators.
        middle: when the backward pass begins.
    """

    changes: list[Change]
    ran: list[Ran]
    middle: Moment


def _without_number(change: Change) -> Any:
    return change[:-1]


def _inserted(into: Sequence[_Item], more: Iterable[tuple[int, list[_Item]]]) -> list[_Item]:
    """All items, and more before those with these numbers."""
    found = list(into)
    for at, items in sorted(more, key=itemgetter(0), reverse=True):
        found[at:at] = items
    return found


class _Watched:
    """Of the class of a block whose calls are watched."""

    autotp_watch: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the block returns, or what stands in for it."""
        return self.autotp_watch(super().__call__, args, kwargs)  # type: ignore[misc]


def _graph(output: Any, given: Sequence[Tensor]) -> list[Any]:
    """What autograd does from what a block returns to what it was given: kinds of nodes, and which go into each."""
    ends = {get_gradient_edge(x).node: at for at, x in enumerate(given) if x.requires_grad}
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad)
    pending = [get_gradient_edge(leaf).node for leaf in leaves]
    numbers: dict[Any, int] = {}
    found: list[Any] = []
    while pending:
        node = pending.pop()
        if node in numbers:
            found.append(numbers[node])
            continue
        numbers[node] = len(numbers)
        found.append(("given", ends[node]) if node in ends else node.name())
        if node not in ends:
            pending.extend(before for before, _ in node.next_functions if before is not None)
    return found


@dataclass(frozen=True)
class _Given:
    """One of the tensors that a block is given.

    Attributes:
        number: which one.
    """

    number: int


def _instead(path: str, output: Any, given: Sequence[Tensor]) -> Any:
    """What a block returns, with tensors that it is given in place of those that it makes."""
    known = {tensor: number for number, tensor in enumerate(given)}
    unused = [number for number, tensor in enumerate(given) if tensor.requires_grad]

    def one(leaf: Tensor) -> _Given:
        if leaf in known:
            return _Given(known[leaf])
        at = next((at for at, number in enumerate(unused) if _metadata(given[number]) == _metadata(leaf)), None)
        if at is None:
            raise NotAlike(f"{path} returns something else than it is given")
        return _Given(unused.pop(at))

    return tree_map_only(Tensor, one, output)


def _filled(returned: Any, given: Sequence[Tensor]) -> Any:
    return tree_map_only(_Given, lambda one: given[one.number], returned)


class Sampled:
    """A rehearsal in which blocks are left out.

    Args:
        model: the rehearsed copy of the model; classes of its blocks are changed.
        repeats: from :func:`repeats_of`.
        fake: the mode that its operators run in.
        meter: the one that counts them; it is to follow the blocks that are not :attr:`like` others.
        are_alike: whether it is known that blocks that are left out run the same operators.

    Attributes:
        like: the block that each left-out one is taken to be like, by their paths.
    """

    def __init__(
        self,
        model: nn.Module,
        repeats: Sequence[Repeats],
        fake: RememberingFakeTensorMode,
        meter: Meter,
        are_alike: bool = False,
    ) -> None:
        self.model, self.repeats, self.fake, self.meter, self.are_alike = model, repeats, fake, meter, are_alike
        self.like = dict(pair for found in repeats for pair in found.alike())
        self._seen: dict[str, Any] = {}
        self._returned: dict[str, Any] = {}
        self._asked: list[Any] = []
        if self.like:
            fake.asked = self._asked
        for path in {*self.like, *self.like.values()}:
            block = model.get_submodule(path)
            kind = type(block)
            vars(block)["autotp_watch"] = partial(self._run, path)
            block.__class__ = type(kind.__name__, (_Watched, kind), {"__module__": kind.__module__})

    def _run(self, path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a block returns: one that is left out returns what it is given."""
        if path in self._seen:
            raise NotAlike(f"{path} runs twice")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if path not in self.like:
            output = self._watched(path, call, args, kwargs, given)
            if self.are_alike:
                self._returned[path] = [_metadata(x) for x in given], _instead(path, output, given)
            return output
        sample = self.like[path]
        if self.are_alike and sample in self._returned:
            expected, returned = self._returned[sample]
            if [_metadata(x) for x in given] != expected:
                raise NotAlike(f"{path} is given something else than {sample}")
            self._seen[path] = self._seen[sample]
            return _filled(returned, given)
        apart = {x: own_shape(x.detach().requires_grad_(), x.shape) for x in given if x.requires_grad}
        args, kwargs = tree_map(lambda x: apart.get(x, x) if isinstance(x, Tensor) else x, (args, kwargs))
        self.meter.is_aside = True
        others = [apart.get(x, x) for x in given]
        try:
            output = self._watched(path, call, args, kwargs, others)
        finally:
            self.meter.is_aside = False
        if self._seen[path] != self._seen.get(sample):
            raise NotAlike(f"{path} does something else than {sample}")
        return _filled(_instead(path, output, others), given)

    def _watched(self, path: str, call: Callable[..., Any], args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        begun = len(self._asked)
        output = call(*args, **kwargs)
        self._seen[path] = self._asked[begun:], _graph(output, given)
        return output

    def step(self, middle: Moment) -> RanStep:
        """The step as if all blocks had run.

        Args:
            middle: when the backward pass of the one that ran began.

        Raises:
            NotAlike: if that is not what they would do.
        """
        begun = [(path, moment) for path, moment in self.meter.begun if moment <= middle]
        first = dict(begun)
        changes: list[tuple[int, list[Change]]] = []
        ran: list[tuple[int, list[Ran]]] = []
        for repeats in self.repeats:
            one, two, three, last = *repeats.groups[:_FIRST], repeats.groups[-1]
            try:
                forward = [first[group[0]] for group in (two, three, last)]
                outside = self.meter.left[last[-1]], self.meter.turned[last[-1]]
                backward = [self.meter.turned[group[-1]] for group in (three, two, one)]
            except KeyError as error:
                raise NotAlike(f"{error} is not differentiated") from None
            moments = [*forward, outside[0], middle, outside[1], *backward]
            if moments != sorted(moments) or len(begun) != len(first) or not set(self.like) <= self._seen.keys():
                raise NotAlike(f"{one[0]} to {last[-1]} do not run one after the other")
            self._compare(forward, two, three)
            self._compare(backward, three, two)
            for at, (start, end), groups in (
                (forward[2], forward[1:], repeats.left_out),
                (backward[0], backward[:2], repeats.left_out[::-1]),
            ):
                added = [self._between(start, end, three, group) for group in groups]
                changes.append((at.changes, [change for more, _ in added for change in more]))
                ran.append((at.ran, [one for _, more in added for one in more]))
            # What is freed for all blocks at once, in any order, such as autocast's copies of parameters.
            for number in range(outside[0].changes, outside[1].changes):
                change = self.meter.changes[number]
                if change.bytes < 0 and forward[0].changes <= change.made < forward[1].changes:
                    changes.append((number + 1, [change] * len(repeats.left_out)))
        before = sum(len(more) for at, more in changes if at <= middle.changes)
        ran_before = sum(len(more) for at, more in ran if at <= middle.ran)
        return RanStep(
            _inserted(self.meter.changes, changes),
            _inserted(self.meter.work.ran, ran),
            Moment(middle.changes + before, middle.ran + ran_before),
        )

    def stepped(self, held: Held) -> list[nn.Parameter]:
        """The parameters that have a gradient in the end, those of left-out blocks included.

        Args:
            held: what is alive then, if all blocks have run.

        Raises:
            NotAlike: if more is there than gradients of left-out blocks, or less.
        """
        alike: dict[nn.Parameter, nn.Parameter] = {}
        for path, other in self.like.items():
            pair = (self.model.get_submodule(each).parameters() for each in (path, other))
            alike |= dict(zip(*pair, strict=True))
        expected = Counter(self.meter.held.live)
        expected["gradients"] += sum(x.grad.numel() * x.grad.itemsize for x in alike.values() if x.grad is not None)
        if any(parameter.grad is not None for parameter in alike) or held.live != expected:
            raise NotAlike("something of the blocks that were left out is used elsewhere")
        return [parameter for parameter in self.model.parameters() if alike.get(parameter, parameter).grad is not None]

    def _compare(self, moments: Sequence[Moment], before: Sequence[str], after: Sequence[str]) -> None:
        start, middle, end = moments
        changes, ran = self._between(start, middle, before, after)
        changes_then, ran_then = self._between(middle, end, after, after)
        if list(map(_without_number, changes)) != list(map(_without_number, changes_then)) or ran != ran_then:
            raise NotAlike(f"{before[0]} does something else than {after[0]}")

    def _between(
        self, start: Moment, end: Moment, blocks: Sequence[str], others: Sequence[str]
    ) -> tuple[list[Change], list[Ran]]:
        """What was done between two moments, as if by other blocks."""
        paths = dict(zip(blocks, others, strict=True))
        ran = self.meter.work.ran[start.ran : end.ran]
        renamed = [one._replace(place=paths.get(one.place, one.place)) for one in ran]
        return self.meter.changes[start.changes : end.changes], renamed
