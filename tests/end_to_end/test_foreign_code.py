"""Modules as other packages write them: copied by their options, changed in place, reached by two paths."""

from __future__ import annotations

import copy
import warnings
from functools import lru_cache
from typing import Any, ClassVar

import pytest
import torch
from compared import assert_same_training
from distributed import run_ranks
from tiny import AttentionBesideMLP
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F
from torch.nn.utils import spectral_norm, weight_norm

from lightning_autotp import make_plan
from lightning_autotp.capture.capture import capture_local, meta_copy
from lightning_autotp.layouts.types import Shard
from lightning_autotp.private.torch_private import has_values
from lightning_autotp.proving import local_sizes


class Heads(nn.Module):
    """Splits or joins heads by its options, of which a copy is made anew, as einops' layers do it.

    It is told how many heads there are or how long each is, and computes the other number from what it is given.
    """

    def __init__(self, heads: int | None = None, length: int | None = None) -> None:
        super().__init__()
        self.options = (heads, length)

    def __getstate__(self) -> Any:
        return self.options

    def __setstate__(self, options: Any) -> None:
        self.__init__(*options)  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        heads, length = self.options
        if heads is None and length is None:
            x = x.transpose(1, 2)
            shape = (*x.shape[:2], x.shape[2] * x.shape[3])
            return x.reshape(shape)
        heads = heads or x.shape[2] // (length or 1)
        return x.reshape((*x.shape[:2], heads, x.shape[2] // heads)).transpose(1, 2)


class Attention(nn.Module):
    """With heads that together are not as long as the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 20, bias=False) for _ in range(3))
        self.split_queries, self.split_keys, self.join = Heads(heads=4), Heads(length=5), Heads()
        self.out = nn.Linear(20, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split_queries(self.q(x)), self.split_keys(self.k(x)), self.split_keys(self.v(x))
        scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        return self.out(self.join(torch.einsum("bhij,bhjd->bhid", scores, v)))


class Gated(nn.Module):
    """Changes in place what it is given, before two products."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.left, self.right = nn.Linear(24, 40), nn.Linear(24, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(x)
        return self.left(x) * self.right(x)


def overwriting() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 24), Gated(), nn.Linear(40, 24))


class Reader(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.layer = embedding, nn.Linear(24, 24)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.embedding(ids))


class Shared(nn.Module):
    """One embedding module in two others."""

    def __init__(self) -> None:
        super().__init__()
        embedding = nn.Embedding(50, 24)
        self.source, self.target = Reader(embedding), Reader(embedding)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.source(source).sum(1, keepdim=True) * self.target(target)


class Keeping(nn.Module):
    """Attention whose keys and values go into a dict, out of which another layer takes them."""

    def __init__(self, keeps: str = "", takes: str = "") -> None:
        super().__init__()
        self.keeps, self.takes = keeps, takes
        self.q, self.out = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)
        if not takes:
            self.k, self.v = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor, kept: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        def heads(states: Tensor) -> Tensor:
            return states.view(*states.shape[:-1], -1, 6).transpose(1, 2)

        k, v = kept[self.takes] if self.takes else (heads(self.k(x)), heads(self.v(x)))
        if self.keeps:
            kept[self.keeps] = k, v
        return self.out(F.scaled_dot_product_attention(heads(self.q(x)), k, v).transpose(1, 2).flatten(2))


class Keepers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Keeping("first"), Keeping("second"), Keeping(takes="first")])

    def forward(self, x: Tensor) -> Tensor:
        kept: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in self.layers:
            x = x + layer(x, kept)
        return x * sum(k.mean() + v.mean() for k, v in kept.values())


class OwnTable(nn.Embedding):
    """A subclass that looks its rows up by itself, rather than by its base class's forward."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight) * 2


class OwnLinear(nn.Linear):
    """One that does the same with its product."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Named(nn.Linear):
    """Of a family whose classes give themselves names, by which they are known."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, name: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        Named.known[name] = cls


class Doubled(Named, name="doubled"):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def of_own_layers() -> nn.Module:
    layers = [OwnLinear(24, 40), nn.GELU(), OwnLinear(40, 24), OwnLinear(24, 50, bias=False)]
    return nn.Sequential(OwnTable(50, 24), *layers)


class Flagged(nn.Module):
    """Its code asks for what its buffers, and other tensors that it holds, say; one of them changes in training."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)
        self.register_buffer("is_started", torch.tensor(False))
        self.register_buffer("is_scaled", torch.tensor([1.0]))
        self.register_buffer("lengths", torch.tensor([10, 14]))
        self.register_buffer("steps", torch.tensor(3))
        self.is_shifted = torch.tensor(True)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_started:
            if not self.training:
                raise RuntimeError("it was not trained")
            self.is_started = torch.ones_like(self.is_started)
        first, second = x.split(self.lengths.tolist(), dim=-1)
        x = torch.cat([second, first], dim=-1)
        if self.is_scaled:
            x = x * min(1.0, self.steps.item() / 10)
        if self.is_shifted:
            x = x + 1
        return self.down(self.up(x).relu())


@lru_cache
def masked(length: int) -> Tensor:
    return torch.full((length, length), float("-inf")).triu(1)


TABLES: dict[int, tuple[Tensor, Tensor]] = {}
last_scale: Tensor | None = None


def rotated(x: Tensor) -> Tensor:
    if x.shape[1] not in TABLES:
        angles = torch.arange(x.shape[1], device=x.device)[:, None] / torch.arange(1, 13, device=x.device)
        TABLES[x.shape[1]] = angles.cos(), angles.sin()
    cos, sin = TABLES[x.shape[1]]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Remembering(nn.Module):
    """What it computes from sizes alone it keeps in a cache, in a dict of its class, and in global variables."""

    shifts: ClassVar[dict[str, dict[int, Tensor]]] = {"all": {}}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        global last_scale
        length = x.shape[1]
        if length not in self.shifts["all"]:
            self.shifts["all"][length] = torch.linspace(0, 1, length, device=x.device)[:, None]
        if last_scale is None or len(last_scale) != length:
            last_scale = torch.arange(length, device=x.device).view(-1, 1) / length
        x = (rotated(x) + self.shifts["all"][length]) * last_scale
        mixed = masked(length).softmax(-1) @ x
        return self.down(self.up(mixed).relu())


def remembered() -> list[Tensor]:
    """What is in these places now."""
    tables = [tensor for pair in TABLES.values() for tensor in pair]
    return [*tables, *Remembering.shifts["all"].values(), *([] if last_scale is None else [last_scale])]


class WithTeacher(nn.Module):
    """Moves a copy of a part of itself after that part, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24))
        self.head = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        nn.init.normal_(self.teacher[0].weight)

    @torch.no_grad()
    def move(self) -> None:
        for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.data.mul_(0.75).add_(other.data, alpha=0.25)

    def forward(self, x: Tensor) -> Tensor:
        self.move()
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.head(self.student(x)) - wanted


def normed() -> nn.Module:
    """Hooks compute the weights of two layers anew before each run; they cannot be copied."""
    torch.manual_seed(0)
    layers = [weight_norm(nn.Linear(24, 24)), nn.GELU(), spectral_norm(nn.Linear(24, 24))]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(24, 80), nn.GELU(), nn.Linear(80, 24))


class Reading(nn.Module):
    """Uses the weights of its layers itself, and how many rows one of them has, as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        scale = 40 / self.up.weight.shape[0]
        x = F.linear(x, self.up.weight * scale, self.up.bias).relu()
        return F.linear(x, self.down.weight / self.down.weight.norm(), self.down.bias)


class Drawing(nn.Module):
    """Has a generator of its own, and makes another one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)
        self.numbers = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        x = x * torch.bernoulli(torch.full_like(x, 0.5), generator=self.numbers)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(5))
        return self.down(x[..., order.to(x.device)].relu())


class Adapter(nn.Module):
    """Puts its own forward in the place of a layer's, as some do who add to a model that they do not change."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(layer.in_features, 4), nn.Linear(4, layer.out_features)
        self.of_layer = layer.forward
        layer.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.of_layer(x) + self.right(self.left(x))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)
        self.adapters = nn.ModuleList([Adapter(self.up), Adapter(self.down)])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


@torch.jit.script
def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x) + 0.5 * x


class Scripted(nn.Module):
    """Calls a function of TorchScript, of which torch makes others after some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swish(self.up(x)))


class Cell(nn.Module):
    """An ``nn.LSTMCell`` that is written as layers."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(40, 160), nn.Linear(40, 160)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        i, f, g, o = (self.of_input(x) + self.of_state(state[0])).chunk(4, dim=-1)
        kept = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * kept.tanh(), kept


class Recurrent(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.before, self.cell, self.after = nn.Linear(24, 40), cell, ordinary(40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        state: Any = x.new_zeros(len(x), 40)
        if not isinstance(self.cell, nn.GRUCell | nn.RNNCell):
            state = state, torch.zeros_like(state)
        found = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return self.after(torch.stack(found, 1))


def ordinary(width: int = 24) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 40), nn.ReLU(), nn.Linear(40, 24))


class Mapped(nn.Module):
    """Runs layers on one row after the other, as ``torch.vmap`` writes it, and an ensemble on all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.member = ordinary(), [ordinary().to("meta")]  # whose own parameters are never used
        stacked, _ = stack_module_state([ordinary() for _ in range(3)])
        self.stacked = nn.ParameterDict({name.replace(".", "_"): value.detach() for name, value in stacked.items()})

    def of_one(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.member[0], weights, (x,))

    def forward(self, x: Tensor) -> Tensor:
        weights = {name.replace("_", "."): value for name, value in self.stacked.items()}
        return torch.vmap(self.rows)(x) + torch.vmap(self.of_one, (0, None))(weights, x).mean(0)


class Force(nn.Module):
    """The derivative of an energy, which layers compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = ordinary()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.layers(x).square().sum())(x)


def train(rank: int, size: int) -> None:
    torch.manual_seed(0)
    states, ids = torch.randn(3, 7, 24), torch.arange(14).view(2, 7)
    square = {"loss_of": lambda result: result.square().mean()}
    attention = assert_same_training(Attention(), (states,), **square).autotp.plan  # type: ignore[union-attr]
    assert attention.sharded_fraction > 0.98
    assert not [item for item in attention.communication if "gather" in item.kind]
    changed = assert_same_training(overwriting(), (states,), **square).autotp.plan  # type: ignore[union-attr]
    assert [change for change in changed.conversions if change.overwritten]
    assert_same_training(Shared(), (ids, ids.flip(0)), **square)
    wide = torch.randn(3, 7, 64)
    for keys in (1, 4):
        beside = assert_same_training(AttentionBesideMLP(keys), (wide,), **square).autotp.plan  # type: ignore[union-attr]
        assert beside.sharded_fraction > 0.94
    assert assert_same_training(nn.Linear(24, 33), (states,), **square).autotp.plan.sharded_fraction == 1  # type: ignore[union-attr]
    assert_same_training(staged(2), (states[..., :16],), **square)
    keepers = assert_same_training(Keepers(), (states,), **square).autotp.plan  # type: ignore[union-attr]
    assert keepers.sharded_fraction > 0.98
    own = assert_same_training(of_own_layers(), (ids,), **square).autotp.plan  # type: ignore[union-attr]
    assert own.sharded_fraction > 0.98
    named = nn.Sequential(Doubled(24, 40), nn.GELU(), Doubled(40, 24))
    assert assert_same_training(named, (states,), **square).autotp.plan.sharded_fraction > 0.98  # type: ignore[union-attr]
    assert Named.known == {"doubled": Doubled}
    remembering = nn.Sequential(Remembering(), Remembering())
    assert assert_same_training(remembering, (states,), **square).autotp.plan.sharded_fraction > 0.98  # type: ignore[union-attr]
    assert all(map(has_values, remembered()))
    moved = assert_same_training(WithTeacher(), (states,), **square)
    assert moved.autotp.plan.sharded_fraction > 0.98  # type: ignore[union-attr]
    hooked = assert_same_training(normed(), (states,), local=normed(), **square)
    assert hooked.autotp.plan.sharded_fraction > 0.85  # type: ignore[union-attr]
    reading = nn.Sequential(Reading(), nn.Linear(24, 80), nn.GELU(), nn.Linear(80, 24))
    plan = assert_same_training(reading, (states,), **square).autotp.plan  # type: ignore[union-attr]
    whole = {item.names[0]: item.reason for item in plan.parameters if not isinstance(item.layout, Shard)}
    assert {"0.up.weight", "0.down.weight"} == {name for name in whole if name.endswith("weight")}
    assert "self.up.weight * scale" in str(whole["0.up.weight"])
    assert assert_same_training(Drawing(), (states,), **square).autotp.plan.sharded_fraction > 0.98  # type: ignore[union-attr]
    assert assert_same_training(Adapted(), (states,), **square).autotp.plan.sharded_fraction > 0.8  # type: ignore[union-attr]
    scripted = Scripted()
    for _ in range(3):
        plan = assert_same_training(scripted, (states,), **square).autotp.plan  # type: ignore[union-attr]
        assert plan.sharded_fraction > 0.98
        scripted.zero_grad()
    recurrent = assert_same_training(Recurrent(Cell()), (states,), **square).autotp.plan  # type: ignore[union-attr]
    assert recurrent.sharded_fraction > 0.97
    for cell in (nn.LSTMCell(40, 40), nn.GRUCell(40, 40), nn.RNNCell(40, 40)):
        plan = assert_same_training(Recurrent(cell), (states,), **square).autotp.plan  # type: ignore[union-attr]
        layouts = {item.names[0]: item.layout for item in plan.parameters}
        assert all(isinstance(layouts[f"after.{at}.weight"], Shard) for at in (0, 2))
    for inner, why in ((Mapped(), "torch.vmap maps it"), (Force(), "torch.func's derivatives cannot be traced")):
        around = nn.Sequential(ordinary(), inner, ordinary())
        plan = assert_same_training(around, (states,), **square).autotp.plan  # type: ignore[union-attr]
        assert set(plan.opaque) <= {"1"}
        layouts = {item.names[0]: item.layout for item in plan.parameters}
        assert all(isinstance(layouts[f"{name}.weight"], Shard) for name in ("0.0", "0.2", "2.0", "2.2"))
        reasons = [str(item.reason) for item in plan.parameters if "1." in item.names[0] and item.reason is not None]
        assert reasons
        assert all(reason.endswith(why) for reason in reasons if reason)
    flagged = Flagged()
    local = assert_same_training(flagged, (states,), **square)
    assert local.autotp.plan.sharded_fraction > 0.98  # type: ignore[union-attr]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # that it cannot be traced in this mode
        torch.testing.assert_close(local.eval()(states), flagged.eval()(states))


def test_loss_and_gradients_equal_one_process() -> None:
    run_ranks(train, 2)


def test_a_trace_leaves_no_tensor_in_what_code_keeps_outside_of_the_model() -> None:
    model = nn.Sequential(Remembering(), Remembering())
    model(torch.zeros(2, 5, 24))
    before = remembered()
    make_plan(model, 2, example_inputs=torch.zeros(3, 7, 24))
    assert all(now is then for now, then in zip(remembered(), before, strict=True))
    assert has_values(masked(7))


def test_recurrent_kernels_do_not_run_on_parts_of_their_gates() -> None:
    """Why they have no rule."""
    x, state = torch.zeros(3, 6), torch.zeros(3, 8)
    for cell, gates, states in ((torch.lstm_cell, 4, (state, state)), (torch.gru_cell, 3, state)):
        with pytest.raises(RuntimeError, match="weight_ih first dim must be"):
            cell(x, states, torch.zeros(gates * 4, 6), torch.zeros(gates * 4, 8))


def test_a_shared_module_is_cut_once() -> None:
    with torch.device("meta"):
        model = Shared()
    plan, _ = make_plan(model, 2, example_inputs=(torch.arange(14).view(2, 7),) * 2)
    (embedding,) = [parameter for parameter in plan.parameters if len(parameter.names) > 1]
    assert isinstance(embedding.layout, Shard)


def test_only_what_is_changed_in_place_gets_memory_of_its_own() -> None:
    model = overwriting()
    plan, _ = make_plan(model, 2, example_inputs=torch.zeros(5, 24))
    assert [change for change in plan.conversions if change.overwritten]
    model[1].act.inplace = False  # type: ignore[union-attr]
    plan, _ = make_plan(model, 2, example_inputs=torch.zeros(5, 24))
    assert plan.conversions
    assert not [change for change in plan.conversions if change.overwritten]


def test_a_copy_keeps_what_was_put_on_a_module_that_is_made_anew() -> None:
    model = nn.Sequential(Heads(heads=2))
    seen: list[nn.Module] = []
    model[0].register_forward_hook(lambda module, args, result: seen.append(module))
    model[0].forward = lambda x: x + 1  # type: ignore[method-assign]
    model.eval()
    copied = meta_copy(model)
    assert copied(torch.zeros(2)).tolist() == [1, 1]
    assert seen == [copied[0]] != [model[0]]
    assert not copied[0].training


class Stage(nn.Module):
    """Attention that works out the length of its heads from what it is given."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, hidden = x.shape
        parts = self.qkv(x).reshape(rows, tokens, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        attended = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return self.out(attended.transpose(1, 2).reshape(rows, tokens, hidden))


def staged(stages: int) -> nn.Module:
    """Stages of other sizes, each twice as wide as the one before."""
    sizes = [(16 * 2**stage, 4 * 2**stage) for stage in range(stages)]
    return nn.Sequential(*(nn.Sequential(Stage(*size), nn.Linear(size[0], 2 * size[0])) for size in sizes))


def test_what_is_local_in_one_stage_is_tried_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = 0

    def count(*args: Any, **options: Any) -> Any:
        nonlocal traces
        traces += 1
        return capture_local(*args, **options)

    monkeypatch.setattr(local_sizes, "capture_local", count)
    counts = []
    for stages in (2, 4):
        traces = 0
        plan, _ = make_plan(staged(stages), 2, example_inputs=torch.zeros(5, 7, 16))
        assert plan.sharded_fraction > 0.95
        assert len(plan.sizes) == 2 * stages
        counts.append(traces)
    assert counts[0] > 3
    assert counts[1] == counts[0]
