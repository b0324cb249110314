"""Parameters used outside of their layers, whole or summed over, on several ranks: one process's loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from local_model import Original, cut, layouts
from rows_of_copies import data
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_autotp import full_gradients, full_tensor, parallelize, penalty
from lightning_autotp.gradients.sums import synchronize_gradients
from lightning_autotp.layouts.blocks import index
from lightning_autotp.layouts.types import Invariant, Partial, Shard
from lightning_autotp.parallel import convert
from lightning_autotp.parameters.local_blocks import counted_blocks, joined
from lightning_autotp.parameters.state import ParameterTable, parallel_state
from lightning_autotp.ranks.agreement import PeerError
from lightning_autotp.ranks.group import TPGroup

Terms = Callable[[str, Tensor], Tensor]


class Access(NamedTuple):
    """The functions under test, or what they mean in one process."""

    whole: Callable[[str], Tensor]
    summed: Callable[..., Tensor]


def of_ranks(model: nn.Module) -> Access:
    return Access(
        lambda name: full_tensor(model, name),
        lambda function, parameters=None: penalty(model, function, parameters=parameters),
    )


def of_one(model: nn.Module) -> Access:
    def summed(function: Terms, parameters: Iterable[str] | None = None) -> Tensor:
        named = dict(model.named_parameters())
        chosen = [n for n, p in named.items() if p.requires_grad] if parameters is None else parameters
        terms = [function(name, named[name]) for name in chosen]
        return torch.stack([each.sum(dtype=torch.promote_types(each.dtype, torch.float32)) for each in terms]).sum()

    return Access(model.get_parameter, summed)


def random(name: str, shape: Any, dtype: torch.dtype = torch.double) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=torch.double).to(
        dtype
    )


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """The original model's gradients, of which every rank must have its part, also where another has it too."""
    whole = full_gradients(module)
    table = ParameterTable(module)
    for name, parameter in module.named_parameters():
        meta = table.meta(parameter)
        if parameter.grad is not None and meta is not None:
            own = joined(parameter.grad)
            for block in meta.mapping:
                torch.testing.assert_close(own[index(block.local)], whole[name][index(block.original)])
    return whole


# --- every kind of layout ---

NAMES = [name for name, _ in Original().named_parameters()]


def original() -> nn.Module:
    model = Original()
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.double() / 8
    return model


def wholes(access: Access) -> Tensor:
    """Of each parameter a nonlinear function of all its elements together, and of a few."""
    total = torch.zeros((), dtype=torch.double)
    for name in [*NAMES, "head.weight"]:
        whole = access.whole(name)
        part = (whole.reshape(-1)[:3] * random(name, ()).to(whole.dtype)).exp().sum()
        total = (
            total + (whole.square().sum() + 1).sqrt() + part + (whole * random(name, whole.shape, whole.dtype)).sum()
        )
    return total


def squares(access: Access) -> Tensor:
    return access.summed(lambda name, p: p.square())


def cubes_of_some(access: Access) -> Tensor:
    return access.summed(lambda name, p: p.pow(3) * len(name), ["crossed", "frozen", "used_differently", "same", "box"])


def both(access: Access) -> Tensor:
    return wholes(access) * squares(access).log() + cubes_of_some(access).tanh()


LOSSES = {function.__name__: function for function in (wholes, squares, cubes_of_some, both)}


def every_layout(rank: int, size: int) -> dict[str, Any]:
    group = TPGroup.of(dist.group.WORLD)
    seen: dict[str, Any] = {}
    for case, function in LOSSES.items():
        model = cut(original(), group, layouts(size))
        synchronize_gradients(model)
        loss = function(of_ranks(model))
        loss.backward()
        seen[case] = loss.detach(), gradients_of(model)
    model = cut(original(), group, layouts(size))
    synchronize_gradients(model)
    seen["values"] = {name: full_tensor(model, name) for name in NAMES}
    seen["by object"] = full_tensor(nn.Sequential(model), model.crossed), full_tensor(model, model.head.weight)
    seen["no parameters"] = penalty(model, lambda name, p: p, parameters=[])
    seen["tied"] = penalty(model, lambda name, p: p, parameters=["even", model.even, "head.weight"])
    for case in ("wholes", "squares"):
        # New objects in parameters' places, before any module ran that would see to their hooks.
        model = cut(original(), group, layouts(size))
        synchronize_gradients(model)
        model.units = nn.Parameter(model.units.detach().clone())
        model.used_differently = nn.Parameter(model.used_differently.detach().clone())
        LOSSES[case](of_ranks(model)).backward()
        seen[f"replaced, {case}"] = gradients_of(model)
    with torch.no_grad():
        seen["without gradients"] = wholes(of_ranks(model)), squares(of_ranks(model))
    return seen


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.nightly), 3, pytest.param(4, marks=pytest.mark.nightly)]
)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(every_layout, request.param)


def assert_gradients(found: dict[str, Tensor], model: nn.Module, rtol: float = 1e-12) -> None:
    wanted = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error, scale = (found[name] - gradient).abs().max(), gradient.abs().max()
        assert found[name].dtype == gradient.dtype
        assert scale > 0, name
        rounding = 2**-7 if gradient.dtype == torch.bfloat16 else 0  # contributions add up in another order
        assert error <= scale * max(rtol, rounding), f"{name} is off by {error / scale:.1e}"


@pytest.mark.parametrize("case", LOSSES)
def test_losses_on_every_layout(ranks: list[dict[str, Any]], case: str) -> None:
    model = original()
    wanted = LOSSES[case](of_one(model))
    wanted.backward()
    for seen in ranks:
        loss, gradients = seen[case]
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)
        assert torch.equal(loss, ranks[0][case][0])
        assert_gradients(gradients, model)


def test_whole_values(ranks: list[dict[str, Any]]) -> None:
    model = original()
    for seen in ranks:
        for name, parameter in model.named_parameters():
            found = seen["values"][name]
            assert torch.equal(found, parameter)
            assert found.dtype == parameter.dtype
            assert found.requires_grad == parameter.requires_grad
        assert torch.equal(seen["by object"][0], model.crossed)
        assert torch.equal(seen["by object"][1], model.even)
        assert seen["no parameters"] == 0
        assert seen["tied"] == model.even.sum()
        assert seen["without gradients"][0] == ranks[0]["without gradients"][0]
        assert not any(each.requires_grad for each in seen["without gradients"])


@pytest.mark.parametrize("case", ["wholes", "squares"])
def test_gradients_of_parameters_that_took_others_places(ranks: list[dict[str, Any]], case: str) -> None:
    model = original()
    LOSSES[case](of_one(model)).backward()
    for seen in ranks:
        assert_gradients(seen[f"replaced, {case}"], model)


# --- derivatives of derivatives ---


def next_order(loss: Tensor, model: nn.Module) -> Tensor:
    """A nonlinear function of the gradient of the loss, by this rank's part of it in a parallel model."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad and p.dtype == torch.double}
    gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True, allow_unused=True)
    state = parallel_state(model) if hasattr(model, "autotp") else None
    same, divided = torch.zeros((), dtype=torch.double), torch.zeros((), dtype=torch.double)
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        if gradient is None:
            continue
        part = gradient.as_subclass(Tensor)
        terms = part.square() + part
        meta = state.metas[name] if state is not None else None
        if state is None or meta is None or not isinstance(meta.layout, Shard):
            same = same + (terms * random(name, terms.shape)).sum()
            continue
        whole = random(name, meta.shape)
        divided = divided + 0.0 * terms.sum()  # a rank that counts nothing takes part in the backward pass
        for block in counted_blocks(parameter, meta, state.group):
            divided = divided + (terms[index(block.local)] * whole[index(block.original)]).sum()
    return same if state is None else same + convert(divided, Partial(), Invariant(), state.group)


def higher_orders(rank: int, size: int) -> dict[tuple[str, int], tuple[Tensor, dict[str, Tensor]]]:
    group = TPGroup.of(dist.group.WORLD)
    seen = {}
    for case, function in LOSSES.items():
        for order in (2, 3):
            model = cut(original(), group, layouts(size))
            synchronize_gradients(model)
            loss = function(of_ranks(model))
            for _ in range(order - 1):
                loss = next_order(loss, model)
            loss.backward()
            seen[case, order] = loss.detach(), gradients_of(model)
    return seen


@pytest.mark.parametrize(
    "number", [2, pytest.param(3, marks=pytest.mark.nightly), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_higher_derivatives_on_every_layout(number: int) -> None:
    results = run_ranks(higher_orders, number)
    for case, order in results[0]:
        model = original()
        wanted = LOSSES[case](of_one(model))
        for _ in range(order - 1):
            wanted = next_order(wanted, model)
        wanted.backward()
        for seen in results:
            loss, gradients = seen[case, order]
            torch.testing.assert_close(loss, wanted.detach(), rtol=1e-10, atol=0)
            assert_gradients(gradients, model, rtol=1e-9)


# --- errors ---


def mistakes(rank: int, size: int) -> dict[str, str]:
    model = cut(original(), TPGroup.of(dist.group.WORLD), layouts(size))
    synchronize_gradients(model)
    strength = torch.ones((), dtype=torch.double, requires_grad=True)

    def one_fails(name: str, p: Tensor) -> Tensor:
        if rank == 1 and name == "units":
            raise KeyError("not here")
        return p

    tries: dict[str, Callable[[], Any]] = {
        "name": lambda: full_tensor(model, "unevn"),
        "foreign name": lambda: full_tensor(model, "something.else"),
        "view": lambda: full_tensor(model, model.even[:2]),
        "name of penalty": lambda: penalty(model, lambda name, p: p, parameters=["evn"]),
        "no model": lambda: full_tensor(nn.Linear(2, 2), "weight"),
        "shape": lambda: penalty(model, lambda name, p: p.sum(), parameters=["even"]),
        "shape on one rank": lambda: penalty(model, lambda name, p: p[:2], parameters=["uneven"]),
        "number": lambda: penalty(model, lambda name, p: 1.0, parameters=["even"]),  # type: ignore[arg-type, return-value]
        "failure": lambda: penalty(model, one_fails),
        "learned": lambda: penalty(model, lambda name, p: strength * p.square(), parameters=["even"]),
        "learned, of a frozen one": lambda: penalty(model, lambda name, p: strength * p, parameters=["frozen"]),
    }
    found = {}
    for case, attempt in tries.items():
        try:
            attempt()
        except (ValueError, RuntimeError, KeyError) as error:
            found[case] = f"{type(error).__name__}: {error}"
    assert torch.equal(penalty(model, lambda name, p: p, parameters=["same"]), original().same.sum())  # nobody hangs
    return found


def test_mistakes_are_errors_on_every_rank() -> None:
    results = run_ranks(mistakes, 3)
    for rank, found in enumerate(results):
        assert found["name"] == "ValueError: 'unevn' is not a parameter of Original; did you mean 'uneven'?"
        assert "where names are those of its named_parameters()" in found["foreign name"]
        assert "tensor of shape (2, 3) is not a parameter of Original" in found["view"]
        assert "did you mean 'even'" in found["name of penalty"]
        assert "no parallel model" in found["no model"]
        assert "this rank's part of even is a Tensor of shape (4, 3)" in found["shape"].replace("Parameter", "Tensor")
        assert "Tensor of shape (): it must return one term for each element" in found["shape"]
        assert "made a 1.0" in found["number"]
        assert "this rank's part of uneven is" in found["shape on one rank"]
        assert found["shape on one rank"].startswith(PeerError.__name__) == (rank > 0)
        assert found["failure"].startswith("KeyError" if rank == 1 else f"{PeerError.__name__}: rank 1 of 3 failed")
        assert "terms of even depend on another tensor that requires a gradient" in found["learned"]
        assert "terms of frozen depend on another tensor" in found["learned, of a frozen one"]
        assert len(found) == 11


# --- real models ---

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "experts_implementation": "batched_mm"}),
}


class Task(nn.Module):
    """A model with losses of one's own around it, written once for one process and for several."""

    def __init__(self, family: str) -> None:
        super().__init__()
        name, changes = FAMILIES[family]
        self.model = tiny_model(name, seed=4, **changes).double().train()
        for parameter in self.model.parameters():  # no bias is zero
            parameter.data += 0.02 * random("noise", parameter.shape)
        frozen = next(n for n, _ in self.model.named_parameters() if ".1." in n and "attn" in n)
        self.model.get_parameter(frozen).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.double))  # outside of the model
        self.names = [name for name, _ in self.named_parameters()]
        self.table, self.head = (
            next(name for name, p in self.named_parameters(remove_duplicate=False) if p is module.weight)
            for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        )

    def hidden(self) -> Tensor:
        return self.model(**token_batch(1), output_hidden_states=True).hidden_states[-1]


def own_head(task: Task, access: Access, start: dict[str, Tensor]) -> Tensor:
    classes = F.linear(task.hidden(), access.whole(task.head)[:50], None)
    return F.cross_entropy(classes.flatten(0, 1), token_batch(1)["input_ids"].flatten() % 50) * task.scale.sum()


def rows(task: Task, access: Access, start: dict[str, Tensor]) -> Tensor:
    embedded = F.embedding(token_batch(2)["input_ids"], access.whole(task.table))
    return (embedded - task.hidden()).square().mean() + access.whole(task.table)[3:9].norm()


def l2(task: Task, access: Access, start: dict[str, Tensor]) -> Tensor:
    return access.summed(lambda name, p: p.square())


def l2_sp(task: Task, access: Access, start: dict[str, Tensor]) -> Tensor:
    return access.summed(lambda name, p: (p - 0.9 * start[name]).square())


def ewc(task: Task, access: Access, start: dict[str, Tensor]) -> Tensor:
    some = [name for name in task.names if "norm" not in name and "ln" not in name]
    return access.summed(lambda name, p: start[name].abs() * (p - start[name].sin()).pow(2), some)


def group_lasso(task: Task, access: Access, start: dict[str, Tensor]) -> Tensor:
    matrices = [name for name in task.names if task.get_parameter(name).dim() > 1]
    norms = [(access.whole(name).square().sum(-1) + 1e-6).sqrt().sum() for name in matrices]
    return torch.stack(norms).sum()


def with_the_models(task: Task, access: Access, start: dict[str, Tensor]) -> Tensor:
    penalties = 1e-3 * l2_sp(task, access, start) + 1e-2 * group_lasso(task, access, start)
    return own_head(task, access, start) + task.model(**token_batch(3)).loss + penalties


USES = {use.__name__: use for use in (own_head, rows, l2, l2_sp, ewc, group_lasso, with_the_models)}


def started(task: Task) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in task.named_parameters()}


def real_models(
    rank: int, size: int, families: tuple[str, ...]
) -> dict[tuple[str, str], tuple[Tensor, dict[str, Tensor]]]:
    seen = {}
    for family in families:
        task = Task(family)
        parallelize(task.model, dist.group.WORLD, example_inputs=token_batch(0))
        assert any(isinstance(meta.layout, Shard) for meta in parallel_state(task.model).metas.values())
        start = started(task)
        for name, use in USES.items():
            task.zero_grad()
            loss = use(task, of_ranks(task), start)
            loss.backward()
            seen[family, name] = loss.detach(), gradients_of(task)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "families"),
    [
        (2, ("gpt2", "llama, one key head")),
        *(pytest.param(number, tuple(FAMILIES), marks=pytest.mark.nightly) for number in (2, 3, 4)),
    ],
)
def test_real_models(number: int, families: tuple[str, ...]) -> None:
    results = run_ranks(real_models, number, families)
    for family in families:
        task = Task(family)
        start = started(task)
        for name, use in USES.items():
            task.zero_grad()
            wanted = use(task, of_one(task), start)
            wanted.backward()
            # Losses, norms and rotary embeddings compute in fp32 whatever a model's weights are. GPT-2's norms do not.
            exact = name != "with_the_models" if family == "gpt2" else name in ("l2", "l2_sp", "ewc", "group_lasso")
            for seen in results:
                loss, gradients = seen[family, name]
                torch.testing.assert_close(loss, wanted.detach(), rtol=1e-10 if exact else 1e-6, atol=0)
                assert_gradients(gradients, task, rtol=1e-9 if exact else 1e-4)


# --- copies that FSDP2 has cut ---


def of_copies() -> nn.Module:
    """With tied embeddings, and norms of heads, whose gradients are sums over the ranks."""
    return tiny_model("qwen3", seed=6, num_hidden_layers=1, tie_word_embeddings=True)


def over_copies(model: Any, access: Access, start: dict[str, Tensor], batch: Tensor) -> Tensor:
    """One use before the forward, others after it."""
    before = access.whole("model.layers.0.self_attn.q_norm.weight").norm() + access.summed(lambda name, p: p.square())
    found = model(input_ids=batch, labels=batch, output_hidden_states=True)
    own = F.linear(found.hidden_states[-1], access.whole("lm_head.weight")).square().mean()
    after = access.summed(lambda name, p: (p - 0.9 * start[name]).square())
    return found.loss + own + 0.1 * before + 0.01 * after + access.whole("model.norm.weight").cos().sum()


def two_by_two(rank: int, size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    copy = mesh["data"].get_local_rank()
    model = of_copies()
    parallelize(model, mesh["tensor"].get_group(), data_mesh=mesh["data"])
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    seen: dict[str, Any] = {"losses": [], "gradients": []}
    for batch in data()[:2]:
        model.zero_grad()
        loss = over_copies(model, of_ranks(model), start, batch[2 * copy : 2 * copy + 2])
        loss.backward()
        seen["losses"].append(loss.item())
        seen["gradients"].append(gradients_of(model))
    assert parallel_state(model).gradient_sums["model.layers.0.self_attn.q_norm.weight"]
    with torch.no_grad():
        model(input_ids=data()[0])
    gathered = model.lm_head.weight
    assert not isinstance(gathered, DTensor)
    seen["by object"] = torch.equal(full_tensor(model, gathered), full_tensor(model, "lm_head.weight"))
    with pytest.raises(ValueError, match="is not a parameter of"):
        full_tensor(model, gathered)  # it no longer is
    for case, loss in {
        "whole": full_tensor(model, "lm_head.weight").square().sum(),
        "sum": penalty(model, lambda name, p: p.pow(3)),
    }.items():
        with pytest.raises(RuntimeError, match="do not go through parameters that FSDP2 has sharded"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)
        seen[case] = True
    with pytest.raises(ValueError, match=r"made a Tensor of shape"):
        penalty(model, lambda name, p: p.to_local().square())
    return seen


@pytest.mark.slow
def test_copies_that_fsdp2_has_cut() -> None:
    results = run_ranks(two_by_two, 4)
    model = of_copies()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step, batch in enumerate(data()[:2]):
        model.zero_grad()
        halves = [over_copies(model, of_one(model), start, half) for half in batch.split(2)]
        torch.stack(halves).mean().backward()
        for rank, seen in enumerate(results):
            assert seen["losses"][step] == pytest.approx(halves[rank // 2].item(), rel=1e-5)
            assert_gradients(seen["gradients"][step], model, rtol=1e-4)
            assert seen["by object"]
