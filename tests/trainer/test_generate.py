"""``model.generate()`` in ``validation_step`` of a parallel model: one process's tokens, on every rank."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from meta_logits import on_meta
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from training import trainer
from writing import (
    BEAMS,
    MODELS,
    NEW,
    ROWS,
    VOCAB,
    WAYS,
    Writer,
    rows,
)

from lightning_autotp.applying.changed_calls import CallChanges, CallMismatch, LocalForward, number, replace_leaf
from lightning_autotp.layouts.places import CallSite
from lightning_autotp.parallel import VocabParallelLogits

TRAINED = ("one key/value head", "cross-attention from a cache")


def written(strategy: Any, devices: int, name: str, ways: tuple[str, ...]) -> dict[str, Any]:
    """Validate; some are then trained for two epochs, with a validation after each in one way, and predict."""
    L.seed_everything(3, verbose=False)
    task = Writer(name)
    task.ways = [*ways]
    loader = DataLoader(rows(MODELS[name][1].get("vocab_size", VOCAB)), batch_size=ROWS)  # type: ignore[arg-type]
    at_once = trainer(strategy, devices)
    at_once.validate(task, loader, verbose=False)
    before = {**task.seen}
    if name in TRAINED:
        task.ways = ["sampling"]
        fitting = trainer(strategy, devices, max_steps=-1, max_epochs=2, num_sanity_val_steps=0)
        fitting.fit(task, loader, loader)
        before["after training"] = task.seen["sampling"]
        before["losses"] = task.seen["losses"]
        before["predicted"] = trainer(strategy, devices).predict(task, loader)
    return before


def on_ranks(models: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    import os

    return {name: written("autotp", int(os.environ["WORLD_SIZE"]), name, ways) for name, ways in models.items()}


ALL = tuple(WAYS)
OF_ENCODERS = ("greedy", "static cache", "sampling", "beams")
"""The others are those of a decoder alone, but for what it takes from the encoder at every step."""
DAILY = (2, {"one key/value head": ALL, "cross-attention from a cache": OF_ENCODERS})
OTHERS = (
    "latent attention", "llama", "fused projection", "linear attention", "experts", "encoder-decoder",
    "cross-attention from a cache",
)  # fmt: skip
NIGHTLY = [(2, dict.fromkeys(OTHERS, ALL)), (3, dict.fromkeys(("one key/value head", "three units"), ALL))]
Models = dict[str, tuple[str, ...]]
Together = tuple[Models, list[dict[str, dict[str, Any]]]]
"""Models, in which ways each writes, and what every rank has seen."""
Alone = dict[str, dict[str, Any]]


@pytest.fixture(
    scope="module", params=[DAILY, *(pytest.param(models, marks=pytest.mark.nightly) for models in NIGHTLY)]
)
def together(request: pytest.FixtureRequest) -> Together:
    """What so many ranks write, of each model."""
    ranks, models = request.param
    return models, run_trainer_ranks(on_ranks, ranks, models)


@pytest.fixture(scope="module")
def alone(together: Together) -> Alone:
    """What one process writes."""
    return {name: written("auto", 1, name, ways) for name, ways in together[0].items()}


def test_every_rank_writes_what_one_process_writes(together: Together, alone: Alone) -> None:
    models, found = together
    for name, ways in models.items():
        for way in ways:
            wanted = alone[name][way]
            assert wanted["tokens"].shape[0] == ROWS
            if way in ("sampling", "penalties"):
                assert len(wanted["tokens"][:, -NEW:].unique()) > 3, f"{name}, {way}: always the same token"
            for seen in found:
                what = f"{name}, {way}"
                assert torch.equal(seen[name][way]["tokens"], wanted["tokens"]), what
                torch.testing.assert_close(
                    seen[name][way]["logits"], wanted["logits"], rtol=1e-4, atol=1e-4, msg=lambda m, w=what: f"{w}: {m}"
                )


@pytest.mark.parametrize("together", [DAILY], indirect=True)
def test_training_goes_on_after_writing(together: Together, alone: Alone) -> None:
    _, pair = together
    for name in TRAINED:
        wanted = alone[name]
        assert len(wanted["losses"]) == 2
        assert not torch.equal(wanted["after training"]["tokens"], wanted["sampling"]["tokens"])
        for seen in pair:
            torch.testing.assert_close(
                torch.tensor(seen[name]["losses"]), torch.tensor(wanted["losses"]), rtol=1e-5, atol=0
            )
            assert torch.equal(seen[name]["after training"]["tokens"], wanted["after training"]["tokens"])
            assert torch.equal(torch.cat(seen[name]["predicted"]), torch.cat(wanted["predicted"]))


def test_nothing_is_said(together: Together) -> None:
    _, found = together
    for seen in found:
        assert {name: one["warnings"] for name, one in seen.items()} == {name: [] for name in seen}


def test_of_the_logits_one_position_is_gathered(together: Together) -> None:
    """Once a step, whatever the sampler does with it; nothing else of these models is gathered."""
    models, found = together
    ranks = len(found)
    for seen in found:
        for name in {"llama", "one key/value head", "three units"} & models.keys():
            vocabulary = MODELS[name][1].get("vocab_size", VOCAB)
            padded = -(-vocabulary // ranks) * ranks
            for way in models[name]:
                calls, moved = seen[name][way]["gathered"]
                assert calls == NEW, (name, way)
                assert moved == NEW * ROWS * (BEAMS if way == "beams" else 1) * padded * 4, (name, way)


def test_a_rank_keeps_keys_and_values_of_its_own_heads(together: Together, alone: Alone) -> None:
    found = together[1]
    ranks = len(found)
    heads = {"llama": 2, "one key/value head": 1, "three units": 3, "fused projection": 4, "experts": 2}
    for name, whole in heads.items():
        if name not in alone:
            continue
        for way in ("greedy", "static cache", "sampling", "beams"):
            shapes = [seen[name][way]["cache"] for seen in found]
            assert len(shapes[0]) == 2
            for at, full in enumerate(alone[name][way]["cache"]):
                assert full[1] == whole
                assert all(one[at][0] == full[0] and one[at][2:] == full[2:] for one in shapes)
                held = [one[at][1] for one in shapes]
                # Each head is on one rank, or, where there are fewer heads than ranks, each rank has one.
                assert (sum(held), max(held)) == (max(whole, ranks), -(-whole // ranks)), (name, way)
    for way in ("greedy", "static cache"):
        for name in {"encoder-decoder", "cross-attention from a cache"} & alone.keys():
            full = alone[name][way]["cache"]
            halves = [(a, b // 2, *rest) for a, b, *rest in full]
            assert len(full) == 2 * 2
            assert all(seen[name][way]["cache"] == halves for seen in found)
        if "latent attention" in alone:
            latents = alone["latent attention"][way]["cache"]
            assert all(heads == 1 for _, heads, *_ in latents)
            assert all(seen["latent attention"][way]["cache"] == latents for seen in found)


class Attention(nn.Module):
    """Cuts features into heads, unless they come from a cache."""

    def forward(self, x: Tensor, cached: Tensor | None = None, otherwise: bool = False) -> Tensor:
        if cached is None:
            cached = x.reshape(-1, 4) if otherwise else x.view(-1, 4)
        return cached.exp()


def local_attention(converts: bool = False) -> Attention:
    module = Attention()
    site = CallSite(__name__, Attention.forward.__code__.co_firstlineno + 2, "view", 0)
    changes = CallChanges(arguments=[(2, number(4, 2))], converts=converts)
    module.forward = LocalForward(module, "attention", {site: changes})  # type: ignore[method-assign]
    return module


def test_what_comes_from_a_cache_is_not_computed_again() -> None:
    x, module = torch.zeros(6), local_attention()
    with pytest.raises(CallMismatch, match="attention did not make the call"):  # it never made it: nothing is known
        module(x, cached=x)
    assert module(x).shape == (3, 2)
    assert module(x, cached=x).shape == (6,)
    with pytest.raises(CallMismatch, match="attention did not make the call"):  # another call in its place
        module(x.repeat(2), otherwise=True)
    converting = local_attention(converts=True)
    assert converting(x).shape == (3, 2)
    with pytest.raises(CallMismatch, match="attention did not make the call"):  # nobody knows the cached one's layout
        converting(x, cached=x)


def test_a_number_that_grows_with_the_batch() -> None:
    change = number(3 * 20, 2 * 20)  # two of three heads, of twenty rows
    assert [replace_leaf(((found,), {}), 0, change)[0] for found in (60, 3, 9)] == [(40,), (2,), (6,)]
    module = local_attention()
    module.forward.changes = {site: CallChanges([(2, number(3, 2))]) for site in module.forward.changes}  # type: ignore
    with pytest.raises(CallMismatch, match="4 where a number was planned, 3 or a multiple"):
        module(torch.zeros(6))


def test_a_copy_of_one_position_is_whole() -> None:
    logits = on_meta()
    with torch.no_grad():
        copies = [
            logits[:, -1].clone(),
            logits[:, -1, :].to(copy=True),
            logits[..., 0, :].double(),
            logits[0][3].clone(),
        ]
        assert [(type(x), tuple(x.shape)) for x in copies] == [(Tensor, (2, 7))] * 3 + [(Tensor, (7,))]
        views = [logits[:, -1], logits[:, -1].float(), logits[:, -1] / 2, logits[:, -2:].clone(), logits[0].clone()]
        assert {type(x) for x in views} == {VocabParallelLogits}
        with pytest.raises(RuntimeError, match="in place"):  # it would not change the logits that it is a view of
            logits[:, -1].mul_(2)
    assert type(logits[:, -1].clone()) is VocabParallelLogits
