"""``model.generate()`` in ``validation_step`` of a parallel model: one process's tokens, on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from test_logits import on_meta
from test_strategy import trainer
from test_wire import Wire
from tiny import tiny_config
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_ranks import run_trainer_ranks
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from lightning_autotp.applying.changed_calls import CallChanges, CallMismatch, LocalForward, number, replace_leaf
from lightning_autotp.layouts.places import CallSite
from lightning_autotp.parallel import VocabParallelLogits

VOCAB, ROWS, NEW, BEAMS = 131, 2, 6, 3
HEAD = 16
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
T5 = {"d_model": 64, "d_kv": HEAD, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **{"d_model": 64, "dropout": 0.0, "max_position_embeddings": 64, "forced_eos_token_id": None},
}
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "one key/value head": ("llama", {"num_key_value_heads": 1, "vocab_size": 67}),
    "three units": ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "fused projection": ("gpt2", GPT2),
    "experts": ("mixtral", {"num_local_experts": 4, "intermediate_size": 96}),
    "linear attention": ("qwen3_next", {}),
    "latent attention": ("deepseek_v3", {}),
    "encoder-decoder": ("bart", BART | TOKENS),
    "cross-attention from a cache": ("t5", T5 | TOKENS),
}
TRAINED = ("llama", "cross-attention from a cache")
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": HEAD, "linear_value_head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": HEAD,
    "q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
OF_FAMILY = {"qwen3_next": LINEAR, "deepseek_v3": LATENT}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.95},
    "beams": {"do_sample": False, "num_beams": BEAMS},
    "penalties": {"do_sample": False, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
}


class Writer(L.LightningModule):
    """Generates in every way, and keeps what came out of it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.seen: dict[str, Any] = {"losses": []}

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        family, changes = MODELS[self.name]
        if family in ("bart", "t5"):
            self.model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **changes))
        else:
            config = tiny_config(family, **changes, **OF_FAMILY.get(family, {}))
            self.model = AutoModelForCausalLM.from_config(config)
        if family != "t5":  # away from logits that are nearly alike; T5's own weights are large
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(4)

    def generate(self, batch: dict[str, Tensor], **how: Any) -> Any:
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "return_dict_in_generate": True}
        return self.model.generate(**inputs, **options, output_logits=True, **how)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.seen["losses"].append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        torch.manual_seed(9)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for way, how in WAYS.items():
                with Wire() as wire:
                    output = self.generate(batch, **how)
                self.seen[way] = {
                    "tokens": output.sequences.clone(),
                    "logits": torch.stack(output.logits).clone(),
                    "cache": cache_shapes(output.past_key_values),
                    "gathered": (wire.calls["all_gather"], wire.bytes["all_gather"]),
                }
        said = [str(warning.message) for warning in caught]
        self.seen["warnings"] = [text for text in said if "vocabulary" in text]

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens: Tensor = self.generate(batch).sequences
        return tokens

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def cache_shapes(cache: Any) -> list[tuple[int, ...]]:
    """Shapes of the keys and values that a rank keeps, layer by layer."""
    if cache is None:
        return []
    parts = [getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, name)]
    layers = [layer for part in parts or [cache] for layer in part.layers if hasattr(layer, "keys")]
    return [tuple(tensor.shape) for layer in layers for tensor in (layer.keys, layer.values)]


def rows(vocabulary: int) -> list[dict[str, Tensor]]:
    """Prompts of nine tokens, the first one padded on the left."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, vocabulary, (ROWS, 9), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    return [
        {"input_ids": row, "attention_mask": seen, "labels": row.masked_fill(seen == 0, -100)}
        for row, seen in zip(ids, mask, strict=True)
    ]


def written(strategy: Any, devices: int, name: str) -> dict[str, Any]:
    """Validate; some are then trained for two epochs, with a validation after each, and predict."""
    L.seed_everything(3, verbose=False)
    task = Writer(name)
    loader = DataLoader(rows(MODELS[name][1].get("vocab_size", VOCAB)), batch_size=ROWS)  # type: ignore[arg-type]
    at_once = trainer(strategy, devices)
    at_once.validate(task, loader, verbose=False)
    before = {**task.seen}
    if name in TRAINED:
        fitting = trainer(strategy, devices, max_steps=-1, max_epochs=2, num_sanity_val_steps=0)
        fitting.fit(task, loader, loader)
        before["after training"] = task.seen["sampling"]
        before["losses"] = task.seen["losses"]
        before["predicted"] = trainer(strategy, devices).predict(task, loader)
    return before


def on_ranks(names: list[str]) -> dict[str, dict[str, Any]]:
    import os

    return {name: written("autotp", int(os.environ["WORLD_SIZE"]), name) for name in names}


RANKS = {
    2: [
        "llama", "fused projection", "experts", "linear attention", "latent attention", "encoder-decoder",
        "cross-attention from a cache",
    ],
    3: ["one key/value head", "three units"],
}  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """What one process writes."""
    return {name: written("auto", 1, name) for name in MODELS}


@pytest.fixture(scope="module")
def pair() -> list[dict[str, dict[str, Any]]]:
    """What two ranks write."""
    return run_trainer_ranks(on_ranks, 2, RANKS[2])


@pytest.fixture(scope="module")
def trio() -> list[dict[str, dict[str, Any]]]:
    """What three ranks write."""
    return run_trainer_ranks(on_ranks, 3, RANKS[3])


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.nightly)])
def together(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, dict[str, Any]]]]:
    """Both of them."""
    return request.param, request.getfixturevalue({2: "pair", 3: "trio"}[request.param])


Together = tuple[int, list[dict[str, dict[str, Any]]]]
Alone = dict[str, dict[str, Any]]


def test_every_rank_writes_what_one_process_writes(together: Together, alone: Alone) -> None:
    ranks, found = together
    for name in RANKS[ranks]:
        for way in WAYS:
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


def test_training_goes_on_after_writing(pair: list[dict[str, dict[str, Any]]], alone: Alone) -> None:
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
    ranks, found = together
    for seen in found:
        for name in ("llama", "one key/value head", "three units"):
            if name not in seen:
                continue
            vocabulary = MODELS[name][1].get("vocab_size", VOCAB)
            padded = -(-vocabulary // ranks) * ranks
            for way in WAYS:
                calls, moved = seen[name][way]["gathered"]
                assert calls == NEW, (name, way)
                assert moved == NEW * ROWS * (BEAMS if way == "beams" else 1) * padded * 4, (name, way)


def test_a_rank_keeps_keys_and_values_of_its_own_heads(together: Together, alone: Alone) -> None:
    ranks, found = together
    heads = {"llama": 2, "one key/value head": 1, "three units": 3, "fused projection": 4, "experts": 2}
    for name, whole in heads.items():
        if name not in RANKS[ranks]:
            continue
        for way in ("greedy", "static cache", "sampling", "beams"):
            shapes = [seen[name][way]["cache"] for seen in found]
            assert len(shapes[0]) == 2 * 2
            for at, full in enumerate(alone[name][way]["cache"]):
                assert full[1] == whole
                assert all(one[at][0] == full[0] and one[at][2:] == full[2:] for one in shapes)
                held = [one[at][1] for one in shapes]
                # Each head is on one rank, or, where there are fewer heads than ranks, each rank has one.
                assert (sum(held), max(held)) == (max(whole, ranks), -(-whole // ranks)), (name, way)
    for way in ("greedy", "static cache"):
        if ranks == 2:
            full = alone["encoder-decoder"][way]["cache"]
            halves = [(a, b // 2, *rest) for a, b, *rest in full]
            assert len(full) == 2 * 2 * 2
            assert all(seen["encoder-decoder"][way]["cache"] == halves for seen in found)
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
