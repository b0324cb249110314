"""What watches a parallel model costs a step: Python calls, counted, which must not grow with the model."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import lightning_autotp
from lightning_autotp import parallelize
from lightning_autotp.guard.guard import Guard
from lightning_autotp.guard.standalone import StandaloneCall

PACKAGE = Path(lightning_autotp.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "what-happens-in-a-step.md"
LOOKS = ("guard/guard.py", "guard/standalone.py", "guard/user_hooks.py", "parameters/snapshot.py",
         "parameters/unchanged.py", "parameters/writes.py", "parameters/state.py", "proving/new_calls.py",
         "proving/call_kinds.py", "proving/configs.py", "proving/attributes.py", "gradients/sums.py")  # fmt: skip
"""Files whose functions look at the model before it runs."""
PRIVATE_LOOKS = ("ModuleHooks.", "compiled_in_place", "hook_tables")
"""Functions of ``private/`` by which they do, as the beginnings of their names."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
}


def python_calls(run: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """How often each function of the package is called, by file and name."""
    found: Counter[tuple[str, str]] = Counter()

    def seen(frame: Any, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            found[file.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname] += 1

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def looks(calls: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    return Counter({at: n for at, n in calls.items() if at[0] in LOOKS or at[1].startswith(PRIVATE_LOOKS)})


def by_file(calls: Counter[tuple[str, str]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for (file, _), count in calls.items():
        found[file] += count
    return found


def is_hooked(module: nn.Module) -> bool:
    """Whether a module inside is looked at where it is not the whole model that runs."""
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), StandaloneCall) for hook in hooks)


TABLES = [name for name in vars(nn.Module()) if "hooks" in name]
"""Of a module's hooks: of its forward, its backward pass, its state dict, before and after."""


def hooks_and_attributes(model: nn.Module) -> dict[str, Any]:
    """All attributes of every module, by path and name, and the hooks in its tables; and those of all optimizers."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found |= {f"{path}.{name}": value for name, value in vars(module).items()}
        found |= {f"{path}.{name} {key}": hook for name in TABLES for key, hook in getattr(module, name).items()}
    for name, hooks in {"before": _global_optimizer_pre_hooks, "after": _global_optimizer_post_hooks}.items():
        found |= {f"{name} steps {key}": hook for key, hook in hooks.items()}
    return found


def differing(model: nn.Module, before: dict[str, Any]) -> list[str]:
    """What is not the same object as before; the order of hooks counts."""
    now = hooks_and_attributes(model)
    if list(now) != list(before):
        return [*(now.keys() ^ before.keys()), "order"]
    plain = int, float, str, type(None)
    return [at for at, it in now.items() if it is not before[at] and not (isinstance(it, plain) and it == before[at])]


@contextmanager
def noted_before_attaching(hooked: str) -> Iterator[dict[str, Any]]:
    """The hooks and attributes of a model that is divided within it, before its guard puts anything on it.

    Args:
        hooked: a module that somebody puts a hook on before that.
    """
    unguarded: dict[str, Any] = {}

    def noted(guard: Guard) -> None:
        guard.calls.detach()
        if hooked:
            guard.model.get_submodule(hooked).register_forward_hook(seen)
        unguarded.update(hooks_and_attributes(guard.model))
        attach(guard)

    attach = Guard.attach
    with mock.patch.object(Guard, "attach", noted):
        yield unguarded


SEEN: list[tuple[int, ...]] = []
"""The shapes that a user's hook has seen."""


def seen(module: nn.Module, args: Any, output: Tensor) -> None:
    SEEN.append(tuple(output.shape))


class Inner(nn.Module):
    """Gives its inner activation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.up(x).relu()
        return self.down(inner), inner


class Routed(nn.Module):
    """Experts in a loop, which values lead."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if token.numel():
                mixed = mixed.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return mixed


class Mixed(nn.Module):
    """Experts beside a layer whose inner activation may be collected; gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(61, 32), nn.LayerNorm(32)
        self.routed, self.beside, self.head = Routed(), Inner(), nn.Linear(32, 61)

    def forward(self, ids: Tensor, is_collected: bool = False) -> Tensor:
        x = self.norm(self.table(ids)).flatten(0, 1)
        beside, inner = self.beside(x)
        loss = F.cross_entropy(self.head(x + self.routed(x) + beside), ids.flatten())
        return loss + inner.cumsum(-1).square().mean() if is_collected else loss


def without_a_guard(rank: int, size: int) -> dict[str, Any]:
    """Of a model after its guard was removed: what is left on it, and how many hooks there had been meanwhile."""
    found: dict[str, Any] = {}
    ids = torch.arange(34).reshape(2, 17)
    for copies in (False, True):
        torch.manual_seed(0)
        model, options = Mixed(), {}
        if copies:
            options["data_mesh"] = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "tensor"))["data"]
        with noted_before_attaching("beside.up") as unguarded:
            model = parallelize(model, dist.group.WORLD, example_inputs=(ids,), **options)
        loss = model(ids)
        loss.backward()
        model(ids, is_collected=True).backward()
        guard = model.autotp.guard
        meanwhile = differing(model, unguarded)
        hooks = len(guard.calls.hooks)
        guard.remove()
        found[f"copies {copies}"] = {
            "meanwhile": meanwhile,
            "of another way": hooks,
            "left behind": differing(model, unguarded),
            "losses": (loss.item(), model(ids).item()),
        }
    inputs = token_batch(1) | {"use_cache": False}
    with noted_before_attaching("") as unguarded:
        model = parallelize(
            tiny_model("llama", num_hidden_layers=1), dist.group.WORLD, example_inputs=inputs, **options
        )
    model(**inputs).loss.backward()
    stands_in = sorted({"generate", "_is_fsdp_managed_module"} & vars(model).keys())
    model.autotp.guard.remove()
    found["generate"] = stands_in, differing(model, unguarded)
    return {**found, "shapes": SEEN}


def counts(rank: int, size: int, layers: int) -> dict[str, Any]:
    """Of a step that is like the one before it."""
    inputs = token_batch(1) | {"use_cache": False}
    model = tiny_model("llama", num_hidden_layers=layers)
    with noted_before_attaching("") as unguarded:
        model = parallelize(model, dist.group.WORLD, example_inputs=inputs)
    for _ in range(2):  # the first one is compared between the ranks
        model(**inputs).loss.backward()
    losses: list[Tensor] = []
    forward = python_calls(lambda: losses.append(model(**inputs).loss))
    backward = python_calls(losses[0].backward)
    found: dict[str, Any] = {
        "calls": {"forward": by_file(forward), "backward": by_file(backward)},
        "forward": looks(forward),
        "hooked modules": sum(is_hooked(module) for module in model.modules() if not isinstance(module, nn.ModuleList)),
        "marked": sum(type(parameter.grad) is not torch.Tensor for parameter in model.parameters()),
    }
    for name, made in OPTIMIZERS.items():
        for foreach in (True, False):
            optimizer = made(model.parameters(), lr=1e-3, foreach=foreach)
            optimizer.step()
            found[f"{name}, {foreach}"] = dict(python_calls(optimizer.step))
    found["clipping"] = dict(python_calls(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    ids = inputs["input_ids"]
    model.model(ids)  # the first one is looked at
    found["alone"] = looks(python_calls(lambda: model.model(ids)))
    hidden = checkpoint(lambda: model.model(ids).last_hidden_state, use_reentrant=False)
    found["again"] = looks(python_calls(hidden.sum().backward))
    model.autotp.guard.remove()
    found["left behind"] = differing(model, unguarded)
    found["loss"] = model(**inputs).loss.item(), model.save_pretrained.__name__
    return found


@pytest.fixture(scope="module")
def small() -> Any:
    return run_ranks(counts, 2, 1)


@pytest.fixture(scope="module")
def large() -> Any:
    return run_ranks(counts, 2, 2)


def test_looks_before_a_forward_are_no_more_calls_in_a_larger_model(small: Any, large: Any) -> None:
    assert_as_many_looks(small, large)


@pytest.mark.nightly
def test_nor_are_they_with_32_layers_where_16_have_as_many() -> None:
    assert_as_many_looks(*(run_ranks(counts, 2, layers) for layers in (16, 32)))


def assert_as_many_looks(small: Any, large: Any) -> None:
    for few, many in zip(small, large, strict=True):
        hooked = ("guard/standalone.py", "StandaloneCall.before")
        assert few["forward"].pop(hooked) == few["hooked modules"]  # nothing but that call in each
        assert many["forward"].pop(hooked) == many["hooked modules"] > few["hooked modules"]
        looks = (
            "guard/guard.py",
            "parameters/snapshot.py",
            "parameters/writes.py",
            "proving/new_calls.py",
        )
        assert {file for file, _ in few["forward"]} >= set(looks)
        assert few["forward"] == many["forward"]


@pytest.mark.parametrize("run", ["alone", "again"])
def test_nor_are_they_where_a_base_model_is_called_alone_or_computed_again(small: Any, large: Any, run: str) -> None:
    """Every hooked module in it only asks whether it has to be looked at."""
    for few, many in zip(small, large, strict=True):
        asked = ("StandaloneCall.before", "ForwardDepth.has_looked_at")[: 2 if run == "alone" else 1]
        for name in asked:
            at = "guard/standalone.py", name
            assert many[run].pop(at) - few[run].pop(at) == many["hooked modules"] - few["hooked modules"]
        assert few[run] == many[run]


def test_a_layer_takes_no_more_python_calls_than_the_page_on_a_step_says(small: Any, large: Any) -> None:
    said = re.search(r"at most \*\*(\d+)\*\*\s+in its forward and \*\*(\d+)\*\* in its backward", PAGE.read_text())
    assert said
    for few, many in zip(small, large, strict=True):
        for run, most in zip(("forward", "backward"), said.groups(), strict=True):
            of_a_layer = many["calls"][run] - few["calls"][run]
            assert 0 < of_a_layer.total() <= int(most), of_a_layer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_on_lists_of_gradients_ask_no_single_one(small: Any, large: Any, optimizer: str) -> None:
    for few, many in zip(small, large, strict=True):
        assert many["marked"] > few["marked"] > 0
        assert few[f"{optimizer}, True"] == many[f"{optimizer}, True"] != {}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_function_of_a_marked_gradient_takes_no_more_than_its_handler(large: Any, optimizer: str) -> None:
    for found in large:
        called = {name: count for (_, name), count in found[f"{optimizer}, False"].items()}
        looks = ["_before_step", "Guard._is_unwritten_before_step", "parallel_state", "Writes.check"]
        looks += ["ComparedValues.before_step", "_after_step", "Guard._note_step", "Writes.note", "note_written"]
        looks += ["Guard.mark_gradients", "mark_gradients", "stepped_by"]
        called["parallel_state"] -= 1  # before and after
        assert max(called.pop(name) for name in list(called) if name.startswith("Bypasses.")) == 2
        assert [called.pop(look) for look in looks] == [1] * len(looks)  # once a step, whatever the model's size
        asked = called.pop("PartOfGradient.__torch_function__")
        assert asked % found["marked"] == 0
        assert called.pop("elementwise") == called.pop("first_part") == asked
        assert called.pop("is_in_optimizer", 0) <= asked  # where a gradient is written into a state
        called.pop("Guard._note_step.<locals>.<genexpr>", None)  # while logits wait to be computed
        assert called == {}


def test_clipping_asks_each_gradient_for_what_it_counts(large: Any) -> None:
    for found in large:
        called = {name: count for (_, name), count in found["clipping"].items()}
        assert called["GradientPart.counted"] == found["marked"]
        assert "counted_elements" not in called  # no rank shares any of it


def test_a_guard_that_is_removed_leaves_nothing_behind(small: Any) -> None:
    for found in small:
        assert found["left behind"] == []
        assert found["loss"] == (small[0]["loss"][0], "save_pretrained")  # runs, and the methods are its own again


def test_a_guard_that_is_removed_takes_with_it_what_calls_have_put_on() -> None:
    """Of a second kind of call, of experts that values lead, of a user's hook, and with FSDP2."""
    for found in run_ranks(without_a_guard, 2):
        for copies in (False, True):
            seen = found[f"copies {copies}"]
            assert seen["of another way"] > 0
            assert any(
                at.startswith("routed.experts.0._forward_pre_hooks") for at in seen["meanwhile"]
            )  # its code is followed
            assert seen["left behind"] == []
            assert seen["losses"][0] == seen["losses"][1]
        assert found["generate"] == (["_is_fsdp_managed_module", "generate"], [])
        assert set(found["shapes"]) == {(34, 48), (34, 24)}  # whole, but for the calls after its guard was removed
