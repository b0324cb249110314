"""Experts in a loop that values lead: divided along their features, whichever experts the tokens choose."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F

from lightning_autotp import UnseenPath, full_gradients, make_plan, parallelize
from lightning_autotp.layouts.places import CallSite
from lightning_autotp.layouts.types import Shard
from lightning_autotp.solving.paths import ZEROS, Outcome, SeenPath, all_fit, fits

HIDDEN, NUMBER, CHOICES = 32, 4, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, 48), nn.Linear(HIDDEN, 48, bias=False)
        self.down = nn.Linear(48, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Mixture(nn.Module):
    """Experts in a list; those that no token chooses are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUMBER)
        self.experts = nn.ModuleList(Expert() for _ in range(NUMBER))

    def chosen(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = torch.topk(self.router(hidden).softmax(-1), CHOICES, dim=-1)
        return weights / weights.sum(-1, keepdim=True), index

    def forward(self, hidden: Tensor) -> Tensor:
        rows, tokens, width = hidden.shape
        hidden = hidden.view(-1, width)
        weights, index = self.chosen(hidden)
        return self.mixed(hidden, weights, index).view(rows, tokens, width)

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        mixed = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        mask = F.one_hot(index, num_classes=NUMBER).permute(2, 1, 0)
        for number in range(NUMBER):
            place, token = torch.where(mask[number])
            if token.numel() == 0:
                continue
            mixed.index_add_(0, token, self.experts[number](hidden[token]) * weights[token, place, None])
        return mixed


class Assigned(Mixture):
    """As some write it: rows are assigned, experts without tokens run on none."""

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        mixed = torch.zeros_like(hidden)
        masks = (index.unsqueeze(-1) == torch.arange(NUMBER, device=hidden.device)).permute(2, 0, 1)
        for mask, expert in zip(masks, self.experts, strict=True):
            token, place = torch.where(mask)
            mixed[token] += weights[token, place, None] * expert(hidden[token])
        return mixed


class Hit(Mixture):
    """A loop over those experts that are chosen, with masks over the tokens."""

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        mixed = hidden.new_zeros(hidden.shape)
        for number in index.unique().tolist():
            is_chosen = index == number
            if not is_chosen.any():
                continue
            tokens = is_chosen.any(-1)
            weight = (weights * is_chosen).sum(-1)[tokens]
            mixed[tokens] = mixed[tokens] + weight[:, None] * self.experts[number](hidden[tokens])
        return mixed


class Sorted(Mixture):
    """Choices sorted by expert, split by how many each got, and put together again; matrices in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.up = nn.Parameter(torch.randn(NUMBER, 2 * 48, HIDDEN) / 6)
        self.down = nn.Parameter(torch.randn(NUMBER * HIDDEN, 48) / 7)
        self.width = 48

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        order = index.flatten().argsort()
        counts = torch.bincount(index.flatten(), minlength=NUMBER).tolist()
        parts = hidden[order // CHOICES].split(counts)
        found = []
        for number, part in enumerate(parts):
            if not len(part):
                continue
            gate, up = F.linear(part, self.up[number]).split(self.width, dim=-1)
            found.append(F.linear(F.silu(gate) * up, self.down.view(NUMBER, HIDDEN, -1)[number]))
        mixed = torch.zeros_like(hidden)
        weighted = torch.cat(found) * weights.flatten()[order, None]
        return mixed.index_add(0, order // CHOICES, weighted)


class Chained(Mixture):
    """Experts that are chains of torch's layers, as most people write them; rows by masks, in two loops."""

    def __init__(self) -> None:
        super().__init__()
        widths = HIDDEN, 48
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(*widths), nn.GELU(), nn.Dropout(0.0), nn.Linear(*widths[::-1]))
            for _ in range(NUMBER)
        )

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        mixed = torch.zeros_like(hidden)
        for choice in range(CHOICES):
            for number in range(NUMBER):
                mask = index[:, choice] == number
                if mask.any():
                    mixed[mask] += weights[mask, choice].unsqueeze(-1) * self.experts[number](hidden[mask])
        return mixed


class ByMask(Chained):
    """One expert for each token, which runs on no tokens as well."""

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        mixed, index, weights = torch.zeros_like(hidden), index[:, 0], weights[:, 0]
        for number, expert in enumerate(self.experts):
            mask = index == number
            mixed[mask] += weights[mask].unsqueeze(-1) * expert(hidden[mask])
        return mixed


class Weighted(Chained):
    """Weights in a matrix with a column for each expert, and tokens by where it was chosen at all."""

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        mixed = torch.zeros_like(hidden)
        of_all = torch.zeros(len(hidden), NUMBER, dtype=hidden.dtype, device=hidden.device)
        of_all = of_all.scatter(-1, index, weights)
        for number, expert in enumerate(self.experts):
            rows = (index == number).any(dim=-1)
            if rows.sum() > 0:
                mixed[rows] += (expert(hidden[rows]) * of_all[rows, number].unsqueeze(1)).squeeze(1)
        return mixed


class Bucketed(Chained):
    """Rows in lists that Python fills."""

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        buckets: list[list[int]] = [[] for _ in range(NUMBER)]
        for row, number in enumerate(index[:, 0].tolist()):
            buckets[number].append(row)
        mixed = torch.zeros_like(hidden)
        for expert, rows in zip(self.experts, buckets, strict=True):
            if rows:
                found = torch.tensor(rows, device=hidden.device)
                mixed[found] = expert(hidden[found]) * weights[found, :1]
        return mixed


class Joined(Chained):
    """Choices sorted by expert, of which some run on no rows, and put back into their order."""

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        order = index.flatten().argsort(stable=True)
        parts = hidden[order // CHOICES].split(index.flatten().bincount(minlength=NUMBER).tolist())
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        outputs = torch.empty_like(outputs).index_copy(0, order, outputs)
        return (outputs.view(-1, CHOICES, HIDDEN) * weights.unsqueeze(-1)).sum(1)


class Sliced(Mixture):
    """Choices sorted by expert, of which each takes a slice, by counts that numpy has."""

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        chosen = index.new_zeros(len(index), NUMBER).scatter_(1, index, 1)
        order = index.flatten().argsort()
        rows = hidden[order // CHOICES]
        found, start = [], 0
        for expert, count in zip(self.experts, chosen.sum(0).cpu().numpy(), strict=True):
            end = start + count
            if count:
                found.append(expert(rows[start:end]))
            start = end
        outputs = torch.cat(found)
        back = torch.empty_like(outputs)
        back[order] = outputs
        return back.view(*index.shape, -1).mul_(weights.unsqueeze(-1)).sum(1)


class Crowded(Mixture):
    """With code for experts that many tokens choose, which synthetic choices do not reach."""

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        if (index == 0).sum() > 0.9 * len(hidden):
            weights = weights.square()
        return super().mixed(hidden, weights, index)


class Skipping(Mixture):
    """A sum that is taken behind the code that is left out: what comes next is of another type then."""

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        mixed = hidden * 0.5
        if (index == 0).any():
            mixed = mixed + self.experts[0](hidden)
        return mixed + super().mixed(hidden, weights, index)


class Doubled(nn.Module):
    """Decides nothing by values, and runs otherwise than in a trace all the same."""

    def forward(self, hidden: Tensor, shift: bool = False) -> Tensor:
        if is_fake(hidden):
            return hidden + hidden
        return 2 * hidden + 1 if shift else 2 * hidden


class Telling(Mixture):
    """Looks at what does not depend on parameters where a trace does not, and calls a module that does so."""

    shifts, uses = False, False

    def __init__(self) -> None:
        super().__init__()
        self.doubled = Doubled()

    def mixed(self, hidden: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        places = torch.arange(len(hidden), device=hidden.device)
        if not is_fake(hidden) and (places[:1] < 0).all():
            raise AssertionError("a place is negative")
        shift = self.shifts and not is_fake(hidden)
        mixed = super().mixed(hidden, weights, index) + self.doubled(hidden, shift=shift)
        scale = places[-1:] if self.uses and not is_fake(hidden) else places
        return mixed * scale[-1:]


class Shifting(Telling):
    """The module is given another flag than in the trace."""

    shifts = True


class Using(Telling):
    """What was looked at becomes a part of the result."""

    uses = True


class Net(nn.Module):
    def __init__(self, mixture: type[Mixture], layers: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(mixture() for _ in range(layers))
        self.last = nn.Linear(HIDDEN, 24)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.last(hidden)


def net(mixture: type[Mixture], layers: int = 1) -> Net:
    torch.manual_seed(0)
    return Net(mixture, layers)


EXAMPLE = torch.zeros(3, 19, HIDDEN)
MIXTURES = (Mixture, Assigned, Hit, Sorted, Chained, ByMask, Weighted, Bucketed, Joined, Sliced)
NIGHTLY = (Assigned, ByMask)
"""Like Weighted and Chained, but for small things; those are trained daily, and all are planned."""


def prefer(model: Net, logits: list[float]) -> None:
    """Let the routers choose experts by these numbers, whatever the tokens are."""
    for layer in model.layers:
        router: Any = layer.router
        with torch.no_grad():
            router.bias.copy_(torch.tensor(logits))


PREFERENCES = {
    "by tokens": [0.0, 0.0, 0.0, 0.0],
    "one expert has none": [0.0, 0.0, -50.0, 0.0],
    "two experts have all": [-50.0, 50.0, -50.0, 50.0],
}


def steps(model: Net) -> list[dict[str, Any]]:
    """Loss and gradients of steps with other choices, each after an update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for number, logits in enumerate(PREFERENCES.values()):
        prefer(model, logits)
        for rows in (2, 1):
            batch = torch.randn(rows, 11, HIDDEN, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            if hasattr(model, "autotp"):
                gradients: dict[str, Any] = full_gradients(model)
            else:
                gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            found.append({"loss": loss.detach(), **{n: None if g is None else g.clone() for n, g in gradients.items()}})
            optimizer.step()
    return found


def trained(rank: int, size: int, mixtures: list[type[Mixture]]) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for mixture in mixtures:
        model = net(mixture)
        parallelize(model, dist.group.WORLD, example_inputs=EXAMPLE)  # type: ignore[arg-type]
        assert not model.autotp.plan.opaque  # type: ignore[union-attr]
        found[mixture.__name__] = steps(model)
    return found


@pytest.mark.parametrize(
    "mixtures",
    [
        pytest.param([mixture for mixture in MIXTURES if mixture not in NIGHTLY], id="daily"),
        pytest.param([*MIXTURES], id="all", marks=pytest.mark.nightly),
    ],
)
def test_training_equals_one_process_whatever_is_chosen(mixtures: list[type[Mixture]]) -> None:
    wanted = {mixture.__name__: steps(net(mixture)) for mixture in mixtures}
    unused = wanted["Mixture"][-1]["layers.0.experts.0.up.weight"]
    assert unused is None or not unused.any()
    for found in run_ranks(trained, 2, mixtures):
        for name, ours in found.items():
            for number, (mine, theirs) in enumerate(zip(ours, wanted[name], strict=True)):
                for key, value in theirs.items():
                    here = mine.get(key)
                    where = f"{name}, step {number}, {key}"
                    if value is None:
                        assert here is None or not here.any(), where
                    else:
                        torch.testing.assert_close(
                            here, value, rtol=1e-4, atol=1e-6, msg=lambda m, w=where: f"{w}: {m}"
                        )


def unseen(rank: int, size: int) -> list[str]:
    said = []
    for mixture in (Crowded, Skipping):
        model = net(mixture)
        whole = copy.deepcopy(model)
        parallelize(model, dist.group.WORLD, example_inputs=EXAMPLE)  # type: ignore[arg-type]
        batch = torch.randn(2, 11, HIDDEN, generator=torch.Generator().manual_seed(0))
        for logits in ([0.0, 0.0, 0.0, 0.0], [50.0, 0.0, 0.0, 0.0], [-50.0, 0.0, 0.0, 0.0]):
            prefer(model, logits)
            prefer(whole, logits)
            try:
                found = model(batch)
            except UnseenPath as error:
                said.append(str(error))
            else:
                torch.testing.assert_close(found, whole(batch), rtol=1e-4, atol=1e-6)
                said.append("")
    return said


def test_a_way_that_was_not_traced_is_an_error_on_every_rank() -> None:
    for crowded, skipping in [(said[:3], said[3:]) for said in run_ranks(unseen, 2)]:
        assert [bool(text) for text in crowded] == [False, True, False]
        assert "square at test_expert_loops" in crowded[1]
        assert "keep_whole=['layers.0']" in crowded[1]
        assert not skipping[0]
        assert not skipping[1]


def told(rank: int, size: int) -> list[str]:
    said = []
    for mixture in (Telling, Shifting, Using):
        model = net(mixture)
        whole = copy.deepcopy(model)
        parallelize(model, dist.group.WORLD, example_inputs=EXAMPLE)  # type: ignore[arg-type]
        assert not model.autotp.plan.opaque  # type: ignore[union-attr]
        batch = torch.randn(2, 11, HIDDEN, generator=torch.Generator().manual_seed(0))
        try:
            torch.testing.assert_close(model(batch), whole(batch), rtol=1e-4, atol=1e-6)
            said.append("")
        except UnseenPath as error:
            said.append(str(error))
    return said


def test_static_values_may_tell_the_way_but_not_go_into_a_result() -> None:
    for telling, shifting, using in run_ranks(told, 2):
        assert telling == ""
        assert "the code of layers.0.doubled" in shifting
        assert "__getitem__ at test_expert_loops" in using
        assert "with (unseen, -), seen with (-, -)" in using


def kept_whole(rank: int, size: int) -> None:
    model = net(Crowded)
    whole = copy.deepcopy(model)
    parallelize(
        model,
        dist.group.WORLD,
        example_inputs=EXAMPLE,
        keep_whole=["layers"],  # type: ignore[arg-type]
    )
    for one in (model, whole):
        prefer(one, [50.0, 0.0, 0.0, 0.0])
    batch = torch.randn(2, 11, HIDDEN, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(batch), whole(batch), rtol=1e-4, atol=1e-6)


def test_whole_modules_may_go_any_way() -> None:
    run_ranks(kept_whole, 2)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_all_experts_are_divided_and_summed_once(mixture: type[Mixture]) -> None:
    with torch.device("meta"):
        model = Net(mixture)
    plan, solution = make_plan(model, 2, example_inputs=EXAMPLE)
    assert solution.graph.value_reading == {"layers.0", "layers.1"}
    layouts = {name: parameter.layout for parameter in plan.parameters for name in parameter.names}
    matrices = [name for name in layouts if any(part in name for part in (".up", ".down", ".experts"))]
    assert all(isinstance(layouts[name], Shard) for name in matrices if not name.endswith("bias"))
    sums = [change for change in plan.conversions if change.source.letter == "P"]
    assert {change.module for change in sums} <= {"layers.0", "layers.1"}
    summed_inside = any(use.output == ("P", "I") and "experts" in use.module for use in plan.implementations)
    assert summed_inside == (mixture in (Joined, Sliced))  # parts of a sum are not copied into another tensor


def test_experts_that_synthetic_choices_do_not_reach_stay_whole() -> None:
    """With one token and two choices, two experts of four are not seen."""
    with torch.device("meta"):
        model = Net(Mixture)
    plan, _ = make_plan(model, 2, example_inputs=torch.zeros(1, 1, HIDDEN))
    assert set(plan.opaque) >= {"layers.0", "layers.1"}
    reasons = {parameter.names[0]: str(parameter.reason) for parameter in plan.parameters}
    assert "with synthetic choices its code does not use layers.0.experts.2" in reasons["layers.0.experts.0.up.weight"]


def test_types_that_fit() -> None:
    nothing: frozenset[Any] = frozenset()
    partial, whole, same, zeros = (frozenset([kind]) for kind in ("P", "I", "R", ZEROS))
    assert fits(partial, partial)
    assert fits(zeros, partial)
    assert fits(nothing, whole)
    assert fits(nothing, same)
    assert not fits(nothing, partial)
    assert not fits(nothing, zeros)
    assert not fits(whole, same)
    assert not fits(same, whole)
    assert not fits(partial, zeros)
    assert all_fit({"a": "P"}, {"a": "P", "b": "I"})
    assert not all_fit({"a": "P"}, {"b": "P"})


def test_what_was_seen_in_two_kinds_of_calls_must_not_contradict() -> None:
    line = ("file", 1, "add")
    given = (frozenset(["R"]),)
    first = SeenPath({line: {given: Outcome(("R",), ())}})
    assert not first.join(SeenPath({line: {given: Outcome(("R",), ())}}))
    assert first.join(SeenPath({line: {given: Outcome(("P",), ())}})) == "add at file:1"


def test_calls_that_values_count_are_known_by_their_line() -> None:
    assert str(CallSite("file", 3, "add", -1)) == "file:3 add"


class WithPictures(nn.Module):
    """Puts pictures where a mask says, which it counts; a tower for sounds is not reached by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.sounds = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, ids: Tensor, pictures: Tensor, sounds: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        mask = (ids == 3).unsqueeze(-1).expand_as(x)
        if x[mask].numel() != pictures.numel():
            raise ValueError("as many placeholders as pictures, please")
        x = x.masked_scatter(mask, pictures)
        if sounds is not None:
            x = x + self.sounds(sounds)
        return self.down(self.up(x).relu())


def test_a_mask_as_large_as_an_activation_is_no_synthetic_value() -> None:
    ids = torch.tensor([[3, 1, 3, 4], [3, 5, 6, 3]])
    plan, solution = make_plan(WithPictures(), 2, example_inputs={"ids": ids, "pictures": torch.randn(4, 8)})
    assert not solution.graph.value_reading
    assert not plan.opaque
    layouts = {name: parameter.layout for parameter in plan.parameters for name in parameter.names}
    assert all(isinstance(layouts[name], Shard) for name in ("up.weight", "down.weight"))
