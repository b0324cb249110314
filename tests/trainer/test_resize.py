"""``resize_token_embeddings`` of a model that is divided: what one process has that resizes the same model.

That several copies of a model cannot be resized is in ``test_changes_after.py``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tied_families import gradients_of
from tiny import tiny_model, token_batch
from torch import Tensor
from torch.nn import functional as F
from trainer_ranks import run_trainer_ranks
from training import Task, assert_parity, error_of, fit, tiny_config
from transformers import AutoModelForCausalLM
from wrapped import Around

from lightning_autotp import full_state_dict, load_full_state_dict, parallelize, save_pretrained
from lightning_autotp.layouts.dims import Axis, Cut
from lightning_autotp.layouts.other_lengths import with_lengths
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.plan import ParameterPlan, Plan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parameters.unchanged import check_unchanged

ROWS = 131  # divided unevenly by 2, 3 and 4 ranks
SMALLEST = 97
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "tied llama": {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 48, "n_head": 6, "n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "phi": {},  # its head has a bias
}
SIZES = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "num_hidden_layers": 1}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    # rows afterwards, and what is asked for
    "grown": (140, {"new_num_tokens": 140}),
    "shrunk and padded": (104, {"new_num_tokens": 100, "pad_to_multiple_of": 8}),
    "only padded": (136, {"pad_to_multiple_of": 8}),
    "grown, drawn as at first": (150, {"new_num_tokens": 150, "mean_resizing": False}),
    "shrunk, drawn as at first": (SMALLEST, {"new_num_tokens": SMALLEST, "mean_resizing": False}),
    "not resized": (ROWS, {"new_num_tokens": ROWS}),
    "not asked for": (ROWS, {}),
}
TRAINED = ("grown", "shrunk and padded", "not asked for")
"""Ways after which the model trains, too; how it gets to its number of rows does not matter then."""
IDS = token_batch(3, vocabulary=SMALLEST)["input_ids"]


def model_of(family: str) -> Any:
    return tiny_model(family.split()[-1], seed=5, **{**SIZES, **FAMILIES[family]}).double().train()


def loss_of(model: Any) -> Tensor:
    # A model's own loss is of fp32 logits.
    return F.cross_entropy(model(input_ids=IDS, use_cache=False).logits.flatten(0, 1), IDS.flatten())


def state_of(model: Any, parallel: bool) -> dict[str, Tensor]:
    return full_state_dict(model) if parallel else {name: value.clone() for name, value in model.state_dict().items()}


def resized(model: Any, parallel: bool, by: str = "", trains: bool = True, **asked: Any) -> dict[str, Any]:
    """What a model is right after it was resized, perhaps by a module in it, and as it trains on."""
    torch.manual_seed(3)
    returned = model.get_submodule(by).resize_token_embeddings(**asked)
    seen: dict[str, Any] = {
        "random": torch.rand(3),
        "state": state_of(model, parallel),
        "settings": settings_of(model),
        "returned": returned is model.get_input_embeddings(),
        "trained": [],
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2 if trains else 0):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        found = {"loss": loss.detach(), "gradients": gradients_of(model, parallel)}
        optimizer.step()
        seen["trained"].append({**found, "weights": state_of(model, parallel)})
    return seen


def settings_of(model: Any) -> tuple[Any, ...]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    own = getattr(model, "vocab_size", None)
    return model.config.vocab_size, own, embedding.num_embeddings, embedding.padding_idx, head.out_features


def check(mine: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    """The same numbers at first, and as close as rounding lets them be while it trains."""
    assert torch.equal(mine["random"], theirs["random"]), what
    assert (mine["settings"], mine["returned"]) == (theirs["settings"], theirs["returned"]), what
    assert mine["state"].keys() == theirs["state"].keys()
    for name, value in theirs["state"].items():
        assert torch.equal(mine["state"][name], value), f"{what}: {name}"
    for ours, others in zip(mine["trained"], theirs["trained"], strict=True):
        torch.testing.assert_close(ours["loss"], others["loss"], rtol=1e-12, atol=0, msg=lambda m: f"{what}: {m}")
        for part in ("gradients", "weights"):
            assert ours[part].keys() == others[part].keys()
            for name, value in others[part].items():
                torch.testing.assert_close(
                    ours[part][name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{what}, {n}: {m}"
                )


def every_way(rank: int, world_size: int, family: str) -> dict[str, Any]:
    original = parallelize(model_of(family), dist.group.WORLD)
    seen: dict[str, Any] = {}
    for way, (_, asked) in WAYS.items():
        model = copy.deepcopy(original)
        seen[way] = resized(model, parallel=True, trains=way in TRAINED, **asked)
        seen[way]["local"] = model.get_input_embeddings().weight.shape[0]
        seen[way]["planned"] = {name: p.shape for p in model.autotp.plan.parameters for name in p.names}
    if family.startswith("tied"):
        seen["by the base"] = resized(copy.deepcopy(original), True, "model", new_num_tokens=140)
    seen["original"] = resized(original, parallel=True)  # its copies had state of their own
    return seen


@pytest.fixture(scope="module")
def wanted() -> Callable[[str], dict[str, dict[str, Any]]]:
    known: dict[str, dict[str, dict[str, Any]]] = {}

    def of(family: str) -> dict[str, dict[str, Any]]:
        if family not in known:
            known[family] = {
                way: resized(model_of(family), parallel=False, trains=way in TRAINED, **asked)
                for way, (_, asked) in WAYS.items()
            }
            known[family]["original"] = known[family]["not asked for"]
            if family.startswith("tied"):
                known[family]["by the base"] = resized(model_of(family), False, "model", new_num_tokens=140)
        return known[family]

    return of


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("gpt2", 2),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in [("llama", 2), ("llama", 4), ("tied llama", 3), ("gpt2", 4), ("phi", 3)]
        ),
    ],
)
def test_as_in_one_process(family: str, ranks: int, wanted: Callable[[str], dict[str, dict[str, Any]]]) -> None:
    theirs = wanted(family)
    found = run_ranks(every_way, ranks, family)
    for seen in found:
        for way in theirs:
            check(seen[way], theirs[way], f"{family}, {way}")
    for way, (rows, _) in WAYS.items():
        (matrix,) = {value.shape[0] for name, value in theirs[way]["state"].items() if name.startswith("lm_head")}
        assert matrix == rows, "one process resizes to the size that is meant"
        # Else this test would be of models that nothing divides.
        assert [seen[way]["local"] for seen in found] == list(Ownership.even(rows, ranks).local_sizes)
        planned = found[0][way]["planned"]
        assert all(planned[name] == tuple(v.shape) for name, v in theirs[way]["state"].items() if name in planned)


# --- other layouts, other calls, other times ---

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {"keep_whole": ["model.embed_tokens", "lm_head"]},
    "cut along the features": {"cut": {"model.embed_tokens.weight": 1, "lm_head.weight": 1}},
}


def twice(model: Any) -> None:
    model.resize_token_embeddings(150)
    model.resize_token_embeddings(110)


def after_a_pass(model: Any) -> None:
    loss_of(model).backward()
    model.zero_grad()
    model.resize_token_embeddings(140)


def after_other_calls(model: Any) -> None:
    """Changes of layout that were found for other kinds of calls are of the old size."""
    calls(model)
    model.resize_token_embeddings(140)


def wrapped(model: Any) -> None:
    model.model.layers[0].mlp = Around(model.model.layers[0].mlp)
    model.resize_token_embeddings(140)


def another_dtype(model: Any) -> None:
    model.float()
    model.resize_token_embeddings(140)
    model.double()


def frozen(model: Any) -> None:
    model.get_input_embeddings().requires_grad_(False)
    model.resize_token_embeddings(140)


def of_a_copy(model: Any) -> None:
    other = copy.deepcopy(model)
    other.resize_token_embeddings(99)
    model.resize_token_embeddings(140)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "twice": twice,
    "after a pass": after_a_pass,
    "after other calls": after_other_calls,
    "wrapped": wrapped,
    "another dtype": another_dtype,
    "frozen": frozen,
    "of a copy": of_a_copy,
}


CALLED = ("after other calls", "wrapped")
"""After which the model is also called in other ways."""


def calls(model: Any) -> dict[str, Any]:
    """Values of other kinds of calls than the one that was traced."""
    seen: dict[str, Any] = {}
    mask = torch.ones_like(IDS)
    mask[0, -3:] = 0
    hooked: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda *given: hooked.append(given[-1]))
    with torch.no_grad():
        out = model(input_ids=IDS, labels=IDS, attention_mask=mask, output_hidden_states=True, use_cache=False)
        seen["loss"], seen["hidden"] = out.loss, out.hidden_states[-1]
        seen["attentions"] = model.eval()(input_ids=IDS, output_attentions=True, use_cache=False).attentions[0]
        seen["alone"] = model.get_output_embeddings()(model.get_input_embeddings()(IDS))
        seen["generated"] = model.generate(IDS[:, :5], max_new_tokens=6, do_sample=False)
    handle.remove()
    seen["hooked"] = hooked[0] + 0
    model.train()
    return {name: value.full() if hasattr(value, "full") else value for name, value in seen.items()}


def changed(make: Callable[[], Any], parallel: bool) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, change in CHANGES.items():
        model = make()
        torch.manual_seed(4)
        change(model)
        seen[name] = {**resized(model, parallel), "calls": calls(model) if name in CALLED else {}}
    return seen


def plain(seen: dict[str, Any]) -> dict[str, Any]:
    """The names without that of a module put around another."""
    if isinstance(seen, dict):
        return {name.replace(".inner", ""): plain(value) for name, value in seen.items()}
    return [plain(each) for each in seen] if isinstance(seen, list) else seen


def attentive(model: Any) -> Any:
    model.set_attn_implementation("eager")  # the other one gives no attention maps
    return model


def other_times(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    original = parallelize(attentive(model_of("llama")), dist.group.WORLD)
    seen = {"changed": changed(lambda: copy.deepcopy(original), parallel=True)}
    for name, options in LAYOUTS.items():
        model = parallelize(model_of("llama"), dist.group.WORLD, **options)
        seen[name] = resized(model, True, new_num_tokens=140)
        seen[name]["local"] = tuple(model.get_input_embeddings().weight.shape)
    torch.manual_seed(rank)  # only the first rank's state is that of the one process
    apart = copy.deepcopy(original)
    apart.resize_token_embeddings(140)
    seen["apart"] = {**state_of(apart, True), "random": torch.rand(3)}
    seen["priced for"] = apart.autotp.plan.priced_for, original.autotp.plan.priced_for
    seen["sent"] = [kind.bytes for kind in apart.autotp.plan.communication]
    again = parallelize(resized_before("llama", rank), dist.group.WORLD)
    seen["sent before"] = [kind.bytes for kind in again.autotp.plan.communication]
    # Files, and whole states.
    save_pretrained(apart, directory)
    load_full_state_dict(apart, {name: value * 2 for name, value in state_of(apart, True).items()})
    seen["doubled"] = state_of(apart, True)
    # Errors.
    model = copy.deepcopy(original)
    seen["differently"] = error_of(model.resize_token_embeddings, 140 + rank)
    seen["on one"] = error_of(model.resize_token_embeddings, 140, *([8] * rank))
    seen["no number"] = error_of(model.resize_token_embeddings, 140, pad_to_multiple_of=1.5)
    seen["no such argument"] = error_of(model.resize_token_embeddings, size=140)
    seen["base"] = error_of(model.model.resize_token_embeddings, 140)  # the untied head would not go with the loss
    seen["too few"] = error_of(model.resize_token_embeddings, world_size - 1)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    seen["optimized"] = error_of(model.resize_token_embeddings, 140)
    optimizer.cycle = optimizer
    del optimizer
    check_unchanged(model)
    seen["after all"] = state_of(model, True)
    model.resize_token_embeddings(140)
    kept = torch.optim.AdamW(model.model.layers.parameters())
    model.resize_token_embeddings(ROWS)  # none of these parameters is replaced
    seen["kept"] = len(kept.param_groups[0]["params"])
    elsewhere = copy.deepcopy(original)
    one: Any = torch.optim.AdamW([elsewhere.lm_head.weight]) if rank == 0 else None
    seen["optimized on one rank"] = error_of(elsewhere.resize_token_embeddings, 140)
    del one
    for name, model in (("written before use", original), ("written", again)):  # neither was called before
        if name == "written":
            loss_of(model)
        model.resize_token_embeddings(150)
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.lm_head.weight[-2:] = 0
            seen[name] = error_of(loss_of, model), [str(warning.message) for warning in caught]
    return seen


def resized_before(family: str, seed: int) -> Any:
    model = attentive(model_of(family))
    torch.manual_seed(seed)
    model.resize_token_embeddings(140)
    return model


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    directory = tmp_path_factory.mktemp("saved")
    return run_ranks(other_times, 2, str(directory)), directory


def test_at_other_times(later: tuple[list[dict[str, Any]], Path]) -> None:
    theirs = changed(lambda: attentive(model_of("llama")), parallel=False)
    for seen in later[0]:
        for name in CHANGES:
            mine, others = plain(seen["changed"][name]), plain(theirs[name])
            check(mine, others, name)
            for call, value in others["calls"].items():
                close = 1e-6 if call == "loss" else 1e-10  # a model's own loss is of fp32 logits
                torch.testing.assert_close(
                    mine["calls"][call], value, rtol=close, atol=close, msg=lambda m, n=(name, call): f"{n}: {m}"
                )


def test_other_layouts(later: tuple[list[dict[str, Any]], Path]) -> None:
    theirs = resized(model_of("llama"), False, new_num_tokens=140)
    for seen in later[0]:
        for name in LAYOUTS:
            check(seen[name], theirs, name)
    assert [seen["whole"]["local"] for seen in later[0]] == [(140, 96), (140, 96)]
    assert [seen["cut along the features"]["local"] for seen in later[0]] == [(140, 48), (140, 48)]


def test_all_ranks_take_the_first_ones_random_numbers(later: tuple[list[dict[str, Any]], Path]) -> None:
    one = resized_before("llama", 0)
    random = torch.rand(3)
    other = resized_before("llama", 1)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    for seen in later[0]:
        for name, value in one.state_dict().items():
            assert torch.equal(seen["apart"][name], value)
            assert torch.equal(seen["doubled"][name], value * 2)
        assert torch.equal(seen["apart"]["random"], random)


def test_what_is_said_of_the_plan(later: tuple[list[dict[str, Any]], Path]) -> None:
    for seen in later[0]:
        now, before = seen["priced for"]
        assert (now, bool(before)) == ("", True), "nobody has looked for a cheaper plan of the new size"
        assert seen["sent"] == seen["sent before"]


def test_what_is_saved_loads(later: tuple[list[dict[str, Any]], Path]) -> None:
    ranks, directory = later
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert loaded.config.vocab_size == 140
    for name, value in loaded.state_dict().items():
        assert torch.equal(ranks[0]["apart"][name], value)


def test_errors_are_on_every_rank_and_change_nothing(later: tuple[list[dict[str, Any]], Path]) -> None:
    whole = "Call it while the model is whole, in configure_model() or before parallelize()"
    before = model_of("llama").state_dict()
    for rank, seen in enumerate(later[0]):
        for name in ("differently", "on one"):
            assert seen[name].startswith("RuntimeError: LlamaForCausalLM.resize_token_embeddings is called differently")
        assert "rank 0: (140); rank 1: (141)" in seen["differently"]
        assert "rank 0: (140); rank 1: (140, 8)" in seen["on one"]
        assert seen["no number"].startswith("ValueError: Asking to pad")
        assert seen["no such argument"].startswith("TypeError: got an unexpected keyword argument 'size'")
        for name in ("base", "too few"):
            assert "the model cannot be divided as it is at this size" in seen[name]
            assert whole in seen[name]
        assert "replaces model.embed_tokens.weight, which an optimizer (AdamW) has already" in seen["optimized"]
        assert "at the beginning of configure_optimizers()" in seen["optimized"]
        said = "replaces lm_head.weight, which an optimizer (AdamW) has already"
        assert said in seen["optimized on one rank"]
        assert seen["optimized on one rank"].startswith("PeerError" if rank else "RuntimeError")
        assert all(torch.equal(seen["after all"][name], value) for name, value in before.items())
        assert seen["kept"]


def test_rows_that_are_written_by_index_afterwards(later: tuple[list[dict[str, Any]], Path]) -> None:
    """An error before the first use, and a warning later, as without resizing."""
    for seen in later[0]:
        error, _ = seen["written before use"]
        assert error.startswith("RuntimeError: lm_head.weight of the parallel LlamaForCausalLM were written in place")
        error, (warning,) = seen["written"]
        assert error == "no error"
        assert warning.startswith("lm_head.weight were written in place, not by an optimizer")


# --- with the Trainer ---


class Resizing(Task):
    """Resizes its model in one of the LightningModule's hooks."""

    def __init__(self, hook: str) -> None:
        super().__init__("config")
        self.hook = hook
        self.refused = ""

    def build(self) -> Any:
        model = AutoModelForCausalLM.from_config(tiny_config())
        if self.hook == "configure_model":
            model.resize_token_embeddings(73)
        return model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.hook == "configure_optimizers":
            self.model.resize_token_embeddings(73)
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.hook == "configure_optimizers":
            self.refused = error_of(self.model.resize_token_embeddings, 80) if hasattr(self.model, "autotp") else ""


def fitted(directory: str, ranks: int) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    task = Resizing("configure_optimizers")
    path = f"{directory}/{ranks}.ckpt"
    seen = {"fitted": fit("autotp", ranks, task, save=path, max_steps=3), "refused": task.refused}
    L.seed_everything(8, verbose=False)
    seen["resumed"] = fit("autotp", ranks, Resizing("configure_optimizers"), ckpt_path=path, max_steps=6)
    return seen


def test_with_the_trainer(tmp_path: Path) -> None:
    L.seed_everything(7, verbose=False)
    wanted = fit("auto", 1, Resizing("configure_optimizers"), max_steps=3)
    found = run_trainer_ranks(fitted, 2, str(tmp_path), 2)
    L.seed_everything(9, verbose=False)
    resumed = fit("auto", 1, Resizing("configure_model"), ckpt_path=tmp_path / "2.ckpt", max_steps=6)
    assert len(resumed["losses"]) == 3
    for name in ("model.model.embed_tokens.weight", "model.lm_head.weight"):
        assert wanted["weights"][name].shape[0] == resumed["weights"][name].shape[0] == 73
    for seen in found:
        assert_parity(seen["fitted"], wanted)
        assert seen["fitted"]["random"] == wanted["random"]
        assert "which an optimizer (AdamW) has already" in seen["refused"]
        assert_parity(seen["resumed"], resumed)


# --- in one process ---


def rows(axes: tuple[int, ...], sizes: tuple[int, ...], dim: Any) -> Shard:
    held = [Ownership.even(size, 2).held for size in sizes]
    return Shard.of({0: Cut(dim, tuple(zip(*held, strict=True)), axes=axes)})


def plan_of(*parameters: tuple[str, tuple[int, ...], Any]) -> Plan:
    return Plan("Model", 2, tuple(ParameterPlan((name,), shape, 4, layout) for name, shape, layout in parameters))


def test_what_a_plan_does_not_tell() -> None:
    vocabulary = rows((3,), (7,), Axis(0, 7))
    plan = plan_of(("table", (7, 4), vocabulary), ("head", (7, 4), vocabulary))
    with pytest.raises(ValueError, match="head has 7 rows, and others that are cut with it have others"):
        with_lengths(plan, {"table": (9, 4)})
    longer = with_lengths(plan, {"table": (9, 4), "head": (9, 4)})
    assert [parameter.layout for parameter in longer.parameters] == [rows((3,), (9,), Axis(0, 9))] * 2
    mapped = plan_of(("table", (7, 4), Shard(vocabulary.dims)))
    with pytest.raises(ValueError, match="the plan does not say which rank has which"):
        with_lengths(mapped, {"table": (9, 4)})
    assert with_lengths(mapped, {"table": (7, 5)}).parameters[0].shape == (7, 5)
