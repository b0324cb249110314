"""The zoo's models of other packages: those of torch itself always, those of others where they are installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from distributed import PATIENCE
from zoo.__main__ import zoo
from zoo.packages import PACKAGES, entries
from zoo.packages.entry import CLASSES, classified, next_token, of_output, states, tokens, towards_noise
from zoo.parity import plan_one, prepare
from zoo.report import GROUP_TITLES, OTHERS_PAGE, to_markdown
from zoo.run import run
from zoo.verdict import Verdict

RESIDUAL = "Conv2d in residual blocks, group norms"
ON_TWO_RANKS = ("Transformer", "Conv2d in a Sequential", RESIDUAL)
"""An encoder and a decoder, convolutions with norms of either kind and in groups. ``ranks/test_multihead_attention.py``
has torch's attention in the ways that it can be made."""


def check(group: str, names: tuple[str, ...]) -> None:
    for verdict in run([(group, name) for name in names], 2, PATIENCE):
        assert verdict.is_parity, f"{verdict.name}: {verdict.outcome}: {verdict.reason}"


@pytest.mark.slow
def test_models_of_torch_train_like_one_process() -> None:
    check("torch", ON_TWO_RANKS)


@pytest.mark.nightly
@pytest.mark.parametrize("group", PACKAGES)
def test_models_of_a_package_train_like_one_process(group: str) -> None:
    if find_spec(PACKAGES[group].distribution.replace("-", "_")) is None:
        pytest.skip(f"{group} is not installed")
    check(group, tuple(entries(group)))


@pytest.mark.parametrize("name", entries("torch"))
def test_a_model_and_its_batch_are_the_same_every_time(name: str) -> None:
    (one, batch), (two, same) = prepare(name, "torch"), prepare(name, "torch")
    assert all(a.equal(b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert {key: value.tolist() for key, value in batch.items()} == {key: same[key].tolist() for key in same}
    entry = entries("torch")[name]
    losses = [entry.loss(model(**batch), batch) for model in (one, one, two)]
    assert losses[0] == losses[1] == losses[2]
    losses[0].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in one.parameters())


def test_a_module_that_is_given_tensors_of_other_lengths_converts_once() -> None:
    """The embedding of source and target is one module; its results change their layout where they leave it."""
    verdict = plan_one("Transformer", "torch", 2)
    assert verdict.outcome == "planned"
    assert verdict.sharded > 0.95


@pytest.mark.parametrize("name", ["Transformer", "MultiheadAttention", RESIDUAL])
def test_nearly_all_of_the_products_are_divided(name: str) -> None:
    """By heads in torch's attention; between the convolutions of a block, whose one activation is in several places."""
    verdict = plan_one(name, "torch", 2)
    assert verdict.flops > 0.95, [f"{left.share:.1%} {left.example}: {left.reason}" for left in verdict.left]


def test_what_losses_ask_for() -> None:
    batch = tokens("x")(torch.Generator().manual_seed(0))
    rows, length = batch["x"].shape
    sure = torch.full((rows, length, 250), -50.0).scatter(2, batch["x"].roll(-1, 1)[..., None], 50.0)
    assert next_token(sure, batch) < 1e-6 < next_token(-sure, batch)
    right = torch.eye(CLASSES)[torch.arange(rows) % CLASSES] * 100
    assert classified(right, {}) < 1e-6 < classified(-right, {})
    assert towards_noise({"sample": right}, {}) == towards_noise((right,), {}) > 0
    assert of_output(torch.tensor(2.0), {}) == 2


def test_sequences_of_one_batch_have_lengths_of_their_own() -> None:
    batch = states("x", "context")(torch.Generator().manual_seed(0))
    assert batch["x"].shape[1] != batch["context"].shape[1]


def test_every_package_has_a_title_and_a_page() -> None:
    assert GROUP_TITLES.keys() >= PACKAGES.keys()
    mine = [Verdict("a", "torch", 2, "parity", parameters=1, sharded=1.0)]
    of_transformers = [Verdict("b", "causal", 2, "parity", parameters=1, sharded=1.0)]
    assert "(zoo.md)" in to_markdown(mine, "", {})
    assert f"({OTHERS_PAGE})" in to_markdown(of_transformers, "", {})


def test_unknown_groups_and_names_are_said() -> None:
    with pytest.raises(SystemExit, match="there is no group cuasal; --group takes one of all, causal"):
        zoo("cuasal")
    with pytest.raises(SystemExit, match=r"llama is in none of the groups \(torch\)"):
        zoo("torch", only=["llama"])
