"""TP x FSDP2 without Lightning: ``parallelize(..., data_mesh=...)``, with one plan for all copies."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from distributed import run_ranks
from edited_plans import without_an_mlp
from loading import peak_of
from mixed_dtypes import Half, Mixed, half_gradients, made, mixed_gradients, rows
from rows_of_copies import data
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_autotp import full_gradients, full_state_dict, parallelize, pipeline
from lightning_autotp.building.deferred import deferred_init
from lightning_autotp.capture.capture import language_model_inputs
from lightning_autotp.gradients.data_parallel import gather_if_uneven, in_parts_again
from lightning_autotp.guard.checked import UnsoundUse, checked
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.parameters.local_blocks import is_cut, joined, plain
from lightning_autotp.pretrained.meta_model import meta_model
from lightning_autotp.private.distributed_private import is_gathered_ahead
from lightning_autotp.proving.verify import trace
from lightning_autotp.solving.options import PlanOptions

WIDTH, LAYERS = 2048, 6


class Found(NamedTuple):
    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]
    in_parts: dict[str, torch.Tensor]
    tied: bool
    managed: int
    plan: Plan
    peak: int
    refused: list[str]
    mixed: dict[str, torch.Tensor]
    half: dict[str, torch.Tensor]
    lowered: dict[str, Any]


def tiny(*, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=60, intermediate_size=90, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
            head_dim=16, vocab_size=101, bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def train(model: Any, gradients_of: Any, batches: torch.Tensor) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, gradients = [], []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def train_in_parts(model: Any, batches: torch.Tensor) -> None:
    """A loop that calls parts of the model, and the model between a backward pass and the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        rows = model.model.embed_tokens(batch)
        rows *= 2
        model(inputs_embeds=rows, labels=batch).loss.backward()
        model.lm_head(model.model(input_ids=batch).last_hidden_state).square().mean().backward()
        with torch.no_grad():
            late = model(input_ids=batch).logits
            torch.testing.assert_close(model.lm_head(model.model(input_ids=batch).last_hidden_state) + 0, late + 0)
        model(input_ids=batch)  # a backward pass could come
        optimizer.step()
        optimizer.zero_grad()


def call_inside_of_a_block(model: Any, state: dict[str, Tensor]) -> None:
    """Modules that FSDP2 gathers with others give what one process gives that has this state."""
    whole = tiny()
    whole.load_state_dict(state)
    x = torch.randn(2, 5, 60)
    for name in ("mlp", "mlp.up_proj", "input_layernorm"):
        ours, theirs = (each.model.layers[1].get_submodule(name) for each in (model, whole))
        with pytest.raises(RuntimeError, match=f"{name} is called on its own with gradients.*call model.layers.1 or"):
            ours(x)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x))
    assert is_cut(model.model.layers[1].mlp.up_proj.weight)


def keep_plans(folder: Path) -> tuple[Plan, Plan]:
    """Keep a plan for each copy in a directory of its own. That of the second one leaves an MLP whole."""
    with meta_model():
        model = tiny()
    options = PlanOptions(plan_cache=folder / "0")
    inputs, options = pipeline._example(model, None, options)
    plan = pipeline.find_plan(model, trace(model, language_model_inputs(model)), inputs, 2, options)
    (file,) = (folder / "0").iterdir()
    other = without_an_mlp(plan)
    (folder / "1").mkdir()
    (folder / "1" / file.name).write_text(other.to_json())
    return plan, other


def two_by_two(rank: int, world_size: int, folder: Path) -> Found:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    copy = mesh["data"].get_local_rank()
    with meta_model():
        model = tiny()
    parallelize(model, mesh["tensor"].get_group(), data_mesh=mesh["data"], plan_cache=folder / str(copy))
    batches = data()[:, 2 * copy : 2 * copy + 2]
    losses, gradients = train(model, full_gradients, batches)
    state = full_state_dict(model)
    train_in_parts(model, batches[:2])
    in_parts = full_state_dict(model)
    call_inside_of_a_block(model, in_parts)
    weight, mlp = model.model.norm.weight, model.model.layers[0].mlp
    with torch.inference_mode():  # in which a DTensor cannot be detached
        inferred = plain(weight), joined(mlp.up_proj.weight)
    assert all(map(torch.equal, inferred, (plain(weight), joined(mlp.up_proj.weight))))
    with checked(model):
        assert not torch.equal(mlp.gate_proj.weight, mlp.up_proj.weight)
        with pytest.raises(UnsoundUse, match="torch ignores that"):
            weight.data = torch.ones(60)
        with pytest.raises(UnsoundUse, match=r"Take loss\.backward"):
            torch.autograd.grad(model(input_ids=batches[0], labels=batches[0]).loss, [weight], allow_unused=True)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    managed = sum(isinstance(module, FSDPModule) for module in model.modules())
    plan = model.autotp.plan  # type: ignore[union-attr]
    others = refused(mesh, folder), mixed_gradients(mesh), half_gradients(), lowered(mesh)
    return Found(losses, gradients, state, in_parts, tied, managed, plan, peak(mesh), *others)


def refused(mesh: DeviceMesh, folder: Path) -> list[str]:
    """What a rank is told where a file of a plan is missing on the first one, and where the last one has no model."""
    said = []
    for plan, last in ((folder / "missing.json", nn.Linear(4, 4)), (None, nn.ReLU())):
        model = nn.Sequential(last if torch.distributed.get_rank() == 3 else nn.Linear(4, 4))
        try:
            parallelize(
                model, mesh["tensor"].get_group(), example_inputs=(torch.zeros(1, 4),), data_mesh=mesh["data"],
                plan=plan, plan_cache=False,
            )  # fmt: skip
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def lowered(mesh: DeviceMesh) -> dict[str, Any]:
    """Under autocast and without it, with parameters that are gathered in float32, and in what autocast computes in."""
    copy, found = mesh["data"].get_local_rank(), {}
    for name, autocast in (("as stored", None), ("in 16 bits", torch.bfloat16)):
        model: Any = parallelize(
            tiny(), mesh["tensor"].get_group(), data_mesh=mesh["data"], autocast=autocast, plan_cache=False,
            keep_whole=["model.layers.0.self_attn.k_proj"],
        )  # fmt: skip
        seen: dict[str, Any] = {"losses": [], "is_both": False}
        seen["dtypes"] = dtypes = {name: [] for name in ("self_attn.q_proj", "input_layernorm")}
        for path, to in dtypes.items():
            layer = model.model.layers[1].get_submodule(path)
            layer.register_forward_pre_hook(lambda module, args, to=to: to.append(module.weight.dtype))

        def loss(is_autocast: bool, model: Any = model, seen: Any = seen) -> torch.Tensor:
            batch = data()[0, 2 * copy : 2 * copy + 2]
            with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                result: torch.Tensor = model(input_ids=batch, labels=batch).loss
            seen["losses"].append(result.item())
            return result

        loss(True).backward()
        pending = loss(True)
        with torch.no_grad():
            loss(False)
            gather_if_uneven(model, [copy], mesh["data"].get_group())
            for _ in range(1 + copy):
                loss(True)
            in_parts_again(model)
        pending.backward()
        loss(False).backward()
        pending = loss(False)
        with contextlib.suppress(RuntimeError):
            loss(True)
            seen["is_both"] = True
        pending.backward()
        names = model.autotp.gathers.names if autocast is not None else frozenset()
        found[name] = {
            **seen,
            "gradients": full_gradients(model),
            "names": names,
            "sums": set(model.autotp.gradient_sums),
        }
    return found


def peak(mesh: DeviceMesh) -> int:
    """Of the memory that a large model takes while it is made, cut both ways and filled."""
    with deferred_init():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(LAYERS)))
    example = torch.zeros(1, WIDTH)

    def make() -> nn.Module:
        return parallelize(model, mesh["tensor"].get_group(), example_inputs=(example,), data_mesh=mesh["data"])

    return peak_of(make)[1]


class Sent(TorchDispatchMode):
    """Counts FSDP2's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls["gather" if "gather" in str(func) else "reduce" if "reduce" in str(func) else str(func)] += 1
        return func(*args, **(kwargs or {}))


class Untied(NamedTuple):
    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    is_cut: list[tuple[bool, bool]]
    forward: Counter[str]
    backward: Counter[str]
    ahead: list[bool]
    left_out: tuple[bool, list[bool]]
    later: list[float]


def block_left_out(model: Any, batch: torch.Tensor, last_block: Callable[[], bool]) -> tuple[bool, list[float]]:
    """A call without the last block between a backward pass and the step, and losses of all blocks after it.

    Returns:
        What ``last_block`` said after the call, and the losses.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer.zero_grad()
    model(input_ids=batch, labels=batch).loss.backward()
    model.config.num_hidden_layers -= 1
    with torch.no_grad():
        model(input_ids=batch, use_cache=False)
    model.config.num_hidden_layers += 1
    left = last_block()
    optimizer.step()
    return left, [model(input_ids=batch, labels=batch).loss.item() for _ in range(2)]


def untied(rank: int, world_size: int) -> Untied:
    """With an embedding that shares nothing with the head, after rows that only some copies have."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    copy, at_the_head = mesh["data"].get_local_rank(), list[tuple[bool, bool]]()
    model = tiny(tied=False)
    parallelize(model, mesh["tensor"].get_group(), data_mesh=mesh["data"], plan_cache=False)
    embedding, head = model.model.embed_tokens, model.lm_head
    head.register_forward_hook(lambda *_: at_the_head.append((is_cut(embedding.weight), is_cut(head.weight))))
    mine = data()[:, 2 * copy : 2 * copy + 2]
    gather_if_uneven(model, [copy], mesh["data"].get_group())
    with torch.no_grad():
        for _ in range(1 + copy):
            model(input_ids=mine[0])
    in_parts_again(model)
    losses, gradients = train(model, full_gradients, mine)
    first, last = model.model.layers
    with Sent() as forward:
        loss = model(input_ids=mine[0], labels=mine[0]).loss
    with Sent() as backward:
        loss.backward()
    seen = at_the_head[1 + copy :]
    ahead = list[bool]()
    for block in (first, last):
        block.mlp.register_forward_hook(lambda *_: ahead.append(is_gathered_ahead(last)))
    left, later = block_left_out(model, mine[0], lambda: is_gathered_ahead(last))
    return Untied(losses, gradients, seen, forward.calls, backward.calls, ahead[:2], (left, ahead[2:]), later)


def planned_for_a_limit(rank: int, world_size: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    parallelize(
        model, mesh["tensor"].get_group(), example_inputs=(torch.zeros(1, 64),), data_mesh=mesh["data"], memory=1e6,
        plan_cache=False,
    )  # fmt: skip
    plan: Plan = model.autotp.plan  # type: ignore[assignment, union-attr]
    return plan.memory_limit, plan.memory_needed - 4 * max(plan.bytes(0), plan.bytes(1))


def test_copies_divide_what_is_limited() -> None:
    assert run_ranks(planned_for_a_limit, 4) == [(2_000_000, 0)] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def plans(folder: Path) -> tuple[Plan, Plan]:
    return keep_plans(folder)


@pytest.fixture(scope="module")
def found(folder: Path, plans: tuple[Plan, Plan]) -> list[Found]:
    results: list[Found] = run_ranks(two_by_two, 4, folder)
    return results


def assert_as_alone(found: Sequence[Found | Untied], losses: list[Any], gradients: list[dict[str, Tensor]]) -> None:
    """The copies' mean losses, and every rank's gradients, are those of one process."""
    for first, second in ((found[0], found[2]), (found[1], found[3])):
        halves = [(one + other) / 2 for one, other in zip(first.losses, second.losses, strict=True)]
        torch.testing.assert_close(halves, losses, rtol=1e-5, atol=0)
    for one in found:
        for mine, theirs in zip(one.gradients, gradients, strict=True):
            for name in theirs:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6)


def test_two_copies_equal_one_process(found: list[Found]) -> None:
    model = tiny()
    losses, gradients = train(
        model, lambda model: {name: value.grad.clone() for name, value in model.named_parameters()}, data()
    )
    assert_as_alone(found, losses, gradients)
    for one in found:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(one.state[name], value, rtol=1e-4, atol=1e-5)
        assert one.tied
        assert one.managed == 3
    train_in_parts(model, data()[:2])
    for one in found:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(one.in_parts[name], value, rtol=1e-4, atol=1e-5)


def test_a_large_embedding_is_gathered_only_while_it_runs() -> None:
    """Once in a step: its gradient does not need its rows. The head is there until the backward pass."""
    model = tiny(tied=False)
    losses, gradients = train(
        model, lambda model: {name: value.grad.clone() for name, value in model.named_parameters()}, data()
    )
    found: list[Untied] = run_ranks(untied, 4)
    assert_as_alone(found, losses, gradients)
    for one in found:
        assert one.is_cut == [(True, False)] * len(one.is_cut)
        # The embedding, two blocks, the rest; two blocks again, and the gradients of all four.
        assert (one.forward, one.backward) == (Counter(gather=4), Counter(gather=2, reduce=4))
        # While the first block runs the second one is gathered.
        assert one.ahead == [True, False]
    # What was gathered of a block that did not run is of before the step; such a block is not gathered ahead again.
    _, later = block_left_out(model, data()[0], lambda: False)
    for one, other in zip(found[:2], found[2:], strict=True):
        assert one.left_out == other.left_out == (False, [True, False, False, False, False])
        halves = [sum(both) / 2 for both in zip(one.later, other.later, strict=True)]
        assert halves == pytest.approx(later, rel=1e-5)


def test_no_rank_ever_has_its_whole_tensor_parallel_part(found: list[Found]) -> None:
    largest = 4 * WIDTH * WIDTH
    held = LAYERS * largest // 4
    assert 1.1 * (held + largest) < LAYERS * largest // 2, "else this proves nothing"
    for one in found:
        assert held <= one.peak <= 1.1 * (held + largest)


def test_all_copies_follow_the_plan_of_the_first(found: list[Found], plans: tuple[Plan, Plan], folder: Path) -> None:
    plan, other = plans
    assert plan != other
    assert [one.plan.digest for one in found] == [plan.digest] * 4
    assert [len(list((folder / copy).iterdir())) for copy in "01"] == [1, 1]  # no copy has planned


def test_what_one_rank_cannot_plan_or_build_is_an_error_on_every_rank_of_all_copies(found: list[Found]) -> None:
    for rank, one in enumerate(found):
        missing, unlike = one.refused
        assert missing.startswith("ValueError" if rank == 0 else "PeerError: rank 0 of 2 failed while planning: ")
        assert "missing.json' cannot be read: No such file or directory" in missing
        assert unlike
        assert unlike.startswith("PeerError") == (rank != 3)


def test_parameters_in_several_dtypes_are_averaged(found: list[Found]) -> None:
    """Also those that FSDP2 cannot gather beside others, and scalars, which it cannot cut."""
    model = made(Mixed)
    for _ in range(2):
        model(rows(torch.float32)).backward()
    for one in found:
        for name, parameter in model.named_parameters():
            assert one.mixed[name].dtype == parameter.dtype
            torch.testing.assert_close(one.mixed[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_gradients_in_16_bits_are_averaged_in_float32(found: list[Found]) -> None:
    """The average is rounded once, not each sum of two."""
    model, gradients = made(Half), []
    for row in rows(torch.bfloat16):
        model(row[None]).backward()
        gradients.append({name: parameter.grad.float() for name, parameter in model.named_parameters()})
        model.zero_grad()
    for name in gradients[0]:
        each = [of_row[name] for of_row in gradients]
        average = torch.stack(each).mean(0).bfloat16()
        pairwise = torch.stack([one / 4 for one in each]).bfloat16()
        assert not torch.equal(average, (pairwise[0] + pairwise[1]) + (pairwise[2] + pairwise[3])), "else no difference"
        for one in found:
            assert torch.equal(one.half[name], average)


def test_what_autocast_casts_is_gathered_in_16_bits(found: list[Found]) -> None:
    """Where it is nothing but an operand of products; with the numbers that it would give in float32."""
    for one in found:
        stored, lowered = one.lowered["as stored"], one.lowered["in 16 bits"]
        in_blocks = {name for name in stored["gradients"] if "_proj." in name}
        assert len(in_blocks) == 7 * 2
        assert lowered["names"] == in_blocks - {"model.layers.0.self_attn.k_proj.weight"}
        assert "model.layers.0.self_attn.k_proj.weight" in lowered["sums"]
        assert {dtype for dtypes in stored["dtypes"].values() for dtype in dtypes} == {torch.float32}
        assert lowered["losses"][: len(stored["losses"]) - 1] == stored["losses"][:-1]
        for name, gradient in stored["gradients"].items():
            torch.testing.assert_close(lowered["gradients"][name], gradient, rtol=1e-5, atol=1e-7)


def test_calls_without_autocast_are_gathered_in_float32(found: list[Found]) -> None:
    """Also while everything stays gathered; without a backward pass between, gradients are of one dtype."""
    for rank, one in enumerate(found):
        calls = [True, True, False, *[False] * (1 + rank // 2), False, False]
        dtypes = [torch.bfloat16 if is_lowered else torch.float32 for is_lowered in calls]
        seen = one.lowered["in 16 bits"]["dtypes"]
        assert seen["self_attn.q_proj"] == dtypes
        assert seen["input_layernorm"] == [torch.float32] * len(dtypes)
        assert (one.lowered["as stored"]["is_both"], one.lowered["in 16 bits"]["is_both"]) == (True, False)
