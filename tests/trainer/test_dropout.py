"""Dropout on sharded tensors: alike on all ranks where they hold the same, independent where they do not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from random_ways import BUILT, train
from rich.console import Console
from selected import nightly, selected
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from trainer_ranks import run_trainer_ranks
from training import SameStart, SavesAfter, Task, assert_parity, loader, trainer

from lightning_autotp import AutoTPStrategy, full_gradients, full_state_dict, make_plan, parallelize
from lightning_autotp.applying.replace import apply_plan
from lightning_autotp.capture.capture import capture_local, language_model_inputs, meta_copy
from lightning_autotp.layouts.plan import DrawPlan, Plan
from lightning_autotp.layouts.types import Invariant
from lightning_autotp.proving.compare import compare
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.ranks.random_numbers import own_numbers

STEPS = 3
PER_CALL = 10
"""Draws that a call makes for the same rows."""
RECOMPUTED = [("eager", False), ("eager", True), ("sdpa", False)]
BY_STRATEGY: list[tuple[str, Any]] = [("sdpa", "blocks"), ("sdpa", "offload"), ("eager", "blocks")]
REPEATS = [("sdpa", False), ("eager", "blocks")]
"""For nightly tests: the same ways with the other attention."""
PAGE = Path(__file__).parents[2] / "docs" / "randomness.md"


class Draws(TorchFunctionMode):
    """Writes down what is dropped: a mask of every dropout, and the generator's state before every attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            self.seen.append(torch.get_rng_state())
        result = func(*args, **kwargs)
        if func is F.dropout and bound(*args, **kwargs)[2]:
            self.seen.append((result != 0) | (args[0] == 0))
        return result


class Replay(TorchFunctionMode):
    """Drops in one process what the ranks dropped from their parts."""

    def __init__(self, ranks: list[list[Tensor]], heads: list[int]) -> None:
        super().__init__()
        self.draws, self.heads = iter(list(zip(*ranks, strict=True))), heads
        self.alike: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            states = next(self.draws)
            parts = zip(*(tensor.split(self.heads, 1) for tensor in args[:3]), strict=True)
            results = []
            with torch.random.fork_rng([]):
                for state, part in zip(states, parts, strict=True):
                    torch.set_rng_state(state)
                    results.append(func(*part, **kwargs))
            return torch.cat(results, 1)
        if func is F.dropout and bound(*args, **kwargs)[2]:
            x, p, _ = bound(*args, **kwargs)
            masks = next(self.draws)
            whole = masks[0].shape == x.shape
            if whole:
                self.alike.append(all(torch.equal(mask, masks[0]) for mask in masks))
            return x * (masks[0] if whole else torch.cat(masks, 1)) / (1 - p)
        return func(*args, **kwargs)


def bound(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Tensor, float, bool]:
    return input, p, training


class Dropping(Task, SameStart):
    """GPT-2 with its own dropout: three heads, so that the ranks hold two and one.

    Args:
        attention: its implementation.
        reentrant: the kind of gradient checkpointing, if any.
        draws: what sees the calls, in training.
    """

    def __init__(self, attention: str = "eager", reentrant: bool | None = None, draws: Any = None) -> None:
        super().__init__("config", 0.3, "SGD")
        self.draws = Draws() if draws is None else draws

    def again(self) -> Dropping:
        """Itself, from the weights with which its first run began, and with nothing seen."""
        self.restore()
        self.begin()
        self.draws = Draws()
        return self

    def build(self) -> Any:
        from transformers import AutoModelForCausalLM, GPT2Config

        config = GPT2Config(
            vocab_size=67, n_embd=48, n_head=3, n_layer=2, n_positions=16, pad_token_id=0, tie_word_embeddings=False
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation=self.hparams["attention"])
        if self.hparams["reentrant"] is not None:
            model.gradient_checkpointing_enable({"use_reentrant": self.hparams["reentrant"]})
        return model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with self.draws:
            return super().training_step(batch, batch_idx)


def fit(strategy: Any, devices: int, task: Dropping, seed: int = 3, **options: Any) -> dict[str, Any]:
    L.seed_everything(seed, verbose=False)
    path = options.pop("ckpt_path", None)
    fitting = trainer(strategy, devices, **{"max_steps": STEPS, **options})
    fitting.fit(task, loader(), ckpt_path=path)
    task.seen["random"] = torch.get_rng_state()
    task.seen["weights"] = (
        full_state_dict(task) if devices > 1 else {k: v.clone() for k, v in task.state_dict().items()}
    )
    task.seen["draws"] = getattr(task.draws, "seen", None)
    return task.seen


class Linear(nn.Module):
    """Linear after its dropout, of which each rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 14), nn.Dropout(0.3), nn.Linear(14, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x)))


class Gumbel(nn.Module):
    """Draws in the midst of a call, for each of five groups."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 20), nn.Linear(20, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gumbel_softmax(self.up(x).unflatten(-1, (-1, 4)), dim=-1).flatten(-2))


def gumbel() -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(3, 6)
    local = parallelize(Gumbel(), dist.group.WORLD, example_inputs=x)  # type: ignore[arg-type]
    torch.manual_seed(1)
    return {"plan": local.autotp.plan, "value": local(x), "random": torch.get_rng_state()}


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Noisy(nn.Module):
    """Noise on tensors of which each rank has a part: of a module without parameters, and of its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.noise, self.second = nn.Linear(6, 20), Noise(), nn.Linear(20, 6)
        self.third, self.fourth = nn.Linear(6, 20), nn.Linear(20, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.noise(self.first(x)).relu()))
        x = self.fourth((x * (1 + torch.rand_like(x))).relu())
        return x.square().mean()


NOISE_KEPT = ((), ("noise",), ("noise", ""))


def noise() -> list[tuple[Plan, Tensor, Tensor]]:
    """With other modules pinned: the plan, what it computes, and what one process does."""
    found = []
    for names in NOISE_KEPT:
        torch.manual_seed(0)
        x, whole, local = torch.randn(3, 6), Noisy(), Noisy()
        local.load_state_dict(whole.state_dict())
        parallelize(local, dist.group.WORLD, example_inputs=x, keep_whole=names)  # type: ignore[arg-type]
        results = []
        for model in (local, whole):
            torch.manual_seed(1)
            results.append(model(x).detach())
        found.append((local.autotp.plan, *results))  # type: ignore[union-attr]
    return found


def linear() -> dict[str, Any]:
    """Many draws of one model, in calls of several; the same compiled; and a forward that draws nothing."""
    torch.manual_seed(0)
    model, x = Linear(), torch.randn(3, 6)
    local = parallelize(model, dist.group.WORLD, example_inputs=x)  # type: ignore[arg-type]
    draws, several = Draws(), x.repeat(PER_CALL, 1)
    with draws, torch.no_grad():
        values = torch.cat([local(several) for _ in range(1500 // PER_CALL)])
    before = torch.get_rng_state()
    expected = local.eval()(x)
    masks = torch.stack(draws.seen)
    seen = {"values": values.view(-1, *expected.shape), "expected": expected, "masks": masks}
    seen["eval leaves the generator alone"] = torch.equal(torch.get_rng_state(), before)
    local.train()
    for name, call in (("eager", local), ("compiled", torch.compile(local, backend="aot_eager"))):
        torch.manual_seed(1)
        local.zero_grad()
        values = call(x)
        values.sum().backward()
        seen[name] = [values.detach(), *full_gradients(local).values(), torch.get_rng_state()]
    return seen


def seed_batches() -> L.Callback:
    """The callback that the documentation shows."""
    (code,) = re.findall(r"^```python\n([^`]*class SeedBatches.*?)^```", PAGE.read_text(), re.M | re.S)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    callback: L.Callback = namespace["SeedBatches"](42)
    return callback


def two_ranks(directory: str, ways: list[str], less: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {"linear": linear(), "gumbel": gumbel(), "noise": noise()}
    tasks = {attention: Dropping(attention) for attention in ("eager", "sdpa")}
    for attention, task in tasks.items():
        seen[attention] = fit("autotp", 2, task)
    for attention, way in less:
        by_model = (attention, way) in RECOMPUTED
        strategy = "autotp" if by_model else AutoTPStrategy(activation_checkpointing=way)
        seen[attention, way] = fit(strategy, 2, Dropping(attention, way if by_model else None))
    seen["ways"] = {name: train(name, 2) for name in ways}
    path = f"{directory}/half.ckpt"
    options = {"limit_train_batches": 1}  # a mid-epoch resume would begin the loader's order anew
    again = tasks["eager"].again()
    seen["whole"] = fit("autotp", 2, again, callbacks=[seed_batches(), SavesAfter(1, path)], **options)
    again = again.again()
    seen["resumed"] = fit("autotp", 2, again, seed=5, callbacks=[seed_batches()], ckpt_path=path, **options)
    return seen


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, less = str(tmp_path_factory.mktemp("dropout")), selected(request, "less")
    return run_trainer_ranks(two_ranks, 2, folder, selected(request, "name"), less)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_one_process_that_drops_the_same_trains_alike(two: list[dict[str, Any]], attention: str) -> None:
    replay = Replay([seen[attention]["draws"] for seen in two], [2, 1])
    wanted = fit("auto", 1, Dropping(attention, draws=replay))
    assert next(replay.draws, None) is None
    assert replay.alike == [True] * (STEPS * 5)
    for seen in two:
        assert_parity(seen[attention], wanted)
    undropped = fit("auto", 1, Dropping(attention))
    assert abs(undropped["losses"][0] - wanted["losses"][0]) > 1e-3


@pytest.mark.parametrize("name", nightly(BUILT, ["chosen", "opt"]))
def test_code_that_goes_where_random_numbers_say_equals_one_process(two: list[dict[str, Any]], name: str) -> None:
    wanted = train(name, 1)
    for seen in two:
        found = seen["ways"][name]
        torch.testing.assert_close(found["losses"], wanted["losses"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["weights"], wanted["weights"], rtol=1e-4, atol=1e-6)
        assert found["drawn"] == wanted["drawn"], "a trace has moved a generator"
        assert found["kinds"] == 2, "each of the ways was traced"
        assert name == "pruned" or found["divided"] > 0.8
        assert found["ways"] == wanted["ways"]
    assert len(wanted["ways"]) == 1 if name == "pruned" else len(wanted["ways"]) > 3


def test_heads_of_different_ranks_are_dropped_from_differently(two: list[dict[str, Any]]) -> None:
    first, second = ([mask for mask in seen["eager"]["draws"] if mask.ndim == 4] for seen in two)
    assert len(first) == STEPS * 2
    for mine, theirs in zip(first, second, strict=True):
        assert [mine.shape[1], theirs.shape[1]] == [2, 1]
        assert all(not torch.equal(mine[:, head], theirs[:, 0]) for head in range(2))
    states = [[state for state in seen["sdpa"]["draws"] if state.dtype == torch.uint8] for seen in two]
    assert len(states[0]) == STEPS * 2
    assert all(not torch.equal(mine, theirs) for mine, theirs in zip(*states, strict=True))


@pytest.mark.parametrize("less", nightly([*RECOMPUTED, *BY_STRATEGY], REPEATS))
def test_what_keeps_less_draws_the_same_again(two: list[dict[str, Any]], less: tuple[str, Any]) -> None:
    """Of the model's own, reentrant or not; and of the strategy's."""
    attention, _ = less
    for seen in two:
        kept, recomputed = seen[attention], seen[less]
        assert kept["losses"] == recomputed["losses"]
        for ours, theirs in zip(kept["gradients"], recomputed["gradients"], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert torch.equal(kept["random"], recomputed["random"])


@pytest.mark.parametrize("less", [("eager", False)])
def test_a_seed_fixes_a_run_bit_for_bit(two: list[dict[str, Any]], less: tuple[str, Any]) -> None:
    for seen in two:
        again = seen[less]
        assert again["losses"] == seen["eager"]["losses"]
        assert all(torch.equal(w, again["weights"][n]) for n, w in seen["eager"]["weights"].items())
        assert seen["whole"]["losses"][0] != seen["eager"]["losses"][0]  # other draws, by the callback


def test_the_common_numbers_stay_common(two: list[dict[str, Any]]) -> None:
    for run in ("eager", "sdpa"):
        assert torch.equal(two[0][run]["random"], two[1][run]["random"])


def test_a_resumed_run_goes_on_bit_for_bit_with_the_documented_callback(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert seen["resumed"]["losses"] == seen["whole"]["losses"][1:]
        assert all(torch.equal(w, seen["resumed"]["weights"][n]) for n, w in seen["whole"]["weights"].items())
        masks = [draw for draw in seen["whole"]["draws"] if draw.ndim == 4]
        assert not torch.equal(masks[0], masks[2])  # a batch's draws are not the last one's again


def test_expected_value_keep_rate_and_independence(two: list[dict[str, Any]]) -> None:
    first, second = (seen["linear"] for seen in two)
    assert torch.equal(first["values"], second["values"])
    count = len(first["values"])
    error = first["values"].std(0) / count**0.5
    assert ((first["values"].mean(0) - first["expected"]).abs() < 5 * error).all()
    assert (error > 0).all()
    calls = [seen["masks"].double() for seen in (first, second)]
    assert [call.shape for call in calls] == [(count // PER_CALL, 3 * PER_CALL, 7)] * 2
    masks = [call.reshape(count, 3, 7) for call in calls]
    for mask in masks:
        assert (mask.mean(0) - 0.7).abs().max() < 5 * (0.21 / count) ** 0.5
    columns = torch.cat([mask.flatten(1) for mask in masks], 1)
    correlations = torch.corrcoef(columns.T) - torch.eye(columns.shape[1])
    assert correlations.abs().max() < 5 / count**0.5
    for rows in (columns, torch.cat([call.flatten(1) for call in calls], 1)):  # of one call, and of one after another
        following = torch.corrcoef(torch.stack([rows[1:].flatten(), rows[:-1].flatten()]))[0, 1]
        assert abs(following) < 5 / rows[1:].numel() ** 0.5


def text_of(plan: Plan) -> str:
    console = Console(width=200)
    with console.capture() as printed:
        console.print(plan.table())
    return printed.get()


def test_the_plan_says_where_ranks_draw_numbers_of_their_own_and_a_pin_makes_them_common(two: Any) -> None:
    for seen in two:
        for names, (plan, value, wanted) in zip(NOISE_KEPT, seen["noise"], strict=True):
            assert plan.sharded_fraction > 0.9
            said = [line.split() for line in text_of(plan).splitlines() if "test_dropout:" in line]
            there = {"noise": "randn_like", "": "rand_like"}
            assert {place: call for place, _, call in said} == {
                f"{path or repr(path)}:": call for path, call in there.items() if path not in names
            }
            assert torch.allclose(value, wanted, rtol=1e-5, atol=0) == (not said)


def test_a_call_may_draw_among_other_things(two: list[dict[str, Any]]) -> None:
    first, second = (seen["gumbel"] for seen in two)
    assert [draw.call.function for draw in first["plan"].draws] == ["gumbel_softmax"]
    assert first["plan"].sharded_fraction > 0.9
    assert torch.equal(first["value"], second["value"])
    assert torch.equal(first["random"], second["random"])


def test_nothing_is_drawn_in_eval_mode(two: list[dict[str, Any]]) -> None:
    assert all(seen["linear"]["eval leaves the generator alone"] for seen in two)


def test_compiled_modules_drop_the_same(two: list[dict[str, Any]]) -> None:
    for seen in two:
        for kept, compiled in zip(seen["linear"]["eager"], seen["linear"]["compiled"], strict=True):
            assert torch.equal(kept, compiled)


# --- planning ---

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_head": 4, "n_layer": 2, "vocab_size": 67, "n_positions": 64},
    "bert": {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 56, "num_hidden_layers": 2,
             "vocab_size": 67},
    "t5": {"d_model": 48, "d_kv": 12, "d_ff": 56, "num_layers": 1, "num_heads": 4, "vocab_size": 67,
           "decoder_start_token_id": 0},
}  # fmt: skip
DROPOUTS = {
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "bert": ("attention_probs_dropout_prob", "hidden_dropout_prob"),
    "t5": ("dropout_rate",),
}


def planned(family: str, attention: str, **changes: float) -> tuple[nn.Module, Any, Plan, Any]:
    import transformers as hf

    auto = {"gpt2": hf.AutoModelForCausalLM, "bert": hf.AutoModelForMaskedLM, "t5": hf.AutoModelForSeq2SeqLM}[family]
    config = hf.AutoConfig.for_model(family, **SIZES[family], **changes)
    with torch.device("meta"):
        model = auto.from_config(config, attn_implementation=attention)
    inputs = language_model_inputs(model)
    if family == "t5":
        inputs = {**inputs, "labels": inputs["input_ids"]}
    return model, inputs, *make_plan(model, 2, example_inputs=inputs)


ATTENTIONS = [(family, attention) for family in SIZES for attention in ("eager", "sdpa")]


@pytest.mark.parametrize("way", nightly(ATTENTIONS, [("gpt2", "sdpa"), ("bert", "eager"), ("t5", "eager")]))
def test_default_dropout_is_sharded_like_none(way: tuple[str, str]) -> None:
    family, attention = way
    model, _, dropping, _ = planned(family, attention)
    assert all(getattr(model.config, name) == 0.1 for name in DROPOUTS[family])
    _, _, plain, _ = planned(family, attention, **dict.fromkeys(DROPOUTS[family], 0.0))
    differing = {
        ours.names[0] for ours, theirs in zip(dropping.parameters, plain.parameters, strict=True) if ours != theirs
    }
    # T5 has one module to drop out for a whole stack: all that it drops from must lie alike, from the embedding on.
    within = "shared.weight" if family == "t5" else "nowhere"
    assert all(name.startswith(within) for name in differing)
    assert dropping.sharded_fraction == plain.sharded_fraction
    assert not plain.draws
    functions = {draw.call.function for draw in dropping.draws}
    drawing = "scaled_dot_product_attention" if attention == "sdpa" else "dropout"
    assert drawing in functions
    assert functions <= {drawing, "dropout"}  # of embeddings, too, where these are cut along their features
    assert Plan.from_json(dropping.to_json()) == dropping


def test_drawing_the_wrong_numbers_is_found_before_training() -> None:
    model, inputs, plan, solution = planned("gpt2", "eager")
    common = next(
        operator
        for operator in solution.graph.operators
        if operator.name == "aten.dropout.default" and isinstance(solution.layouts[operator.outputs[0]], Invariant)
    )
    call = solution.graph.calls[common.call]

    def difference(corrupted: Plan) -> str:
        local = meta_copy(model)
        apply_plan(local, corrupted, TPGroup("", 1, 2))
        return str(compare(capture_local(local, inputs), solution, 1))

    assert difference(plan) == "None"
    dropped = replace(plan, draws=plan.draws[1:])
    assert "must draw its own random numbers" in difference(dropped)
    added = replace(plan, draws=(*plan.draws, DrawPlan(call.module, call.site)))
    assert "must draw the group's common random numbers" in difference(added)


# --- the numbers themselves ---


def test_own_numbers_are_each_ranks_own_and_the_common_ones_go_on() -> None:
    drawn, left = [], []
    for rank in range(3):
        torch.manual_seed(7)
        with own_numbers(TPGroup("", rank, 3), torch.device("cpu")):
            drawn.append(torch.rand(2 + rank)[:2])
        left.append(torch.rand(2))
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 3
    assert torch.equal(left[0], left[1])
    assert torch.equal(left[0], left[2])
    torch.manual_seed(7)
    assert not torch.equal(torch.rand(2), left[0])  # the calls before it took their seeds from there


def test_an_error_among_own_numbers_leaves_the_common_ones_alone() -> None:
    left = []
    for fails in (False, True):
        torch.manual_seed(7)
        try:
            with own_numbers(TPGroup("", 0, 2), torch.device("cpu")):
                torch.rand(3)
                if fails:
                    raise KeyError("planted")
        except KeyError:
            pass
        left.append(torch.rand(2))
    assert torch.equal(*left)
