"""transformers' ``Trainer`` and TRL's on a parallel model: what one process gives, resumed at any number of ranks."""

from __future__ import annotations

import gc
import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from trainer_ranks import run_trainer_ranks
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments

from lightning_autotp import AutoTPTrainerMixin, CheckpointError, full_state_dict, parallelize

VOCAB = 37  # divides by no number of ranks, as the three heads


class Trainer(AutoTPTrainerMixin, transformers.Trainer):
    pass


class OwnLoss(Trainer):
    """Computes another loss on each rank, in a step in which nothing else is compared."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return (1 + 0.01 * dist.get_rank() * (self.state.global_step == 1)) * super().compute_loss(*args, **kwargs)


class Drifting(Trainer):
    """Writes into the first norm on one rank, after the second step of four."""

    def training_step(self, model: Any, *others: Any) -> Tensor:
        if self.state.global_step == 2 and dist.get_rank() == 1:
            with torch.no_grad():
                model.model.norm.weight.mul_(1.01)
        return super().training_step(model, *others)


class Sequences(Dataset[dict[str, Tensor]]):
    """Of which the loss counts different numbers of tokens, so that a mean of means is not the mean."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.where(torch.arange(12) > index % 7, -100)}


class Noisy(Sequences):
    """Whose tokens change by random numbers of the worker that reads them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        example = super().__getitem__(index)
        noise = torch.rand(12) < 0.2
        return {**example, "input_ids": example["input_ids"].where(~noise, torch.randint(0, VOCAB, (12,)))}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(Sequences().__getitem__, range(40))


def plain() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=24, intermediate_size=36, num_hidden_layers=1, num_attention_heads=3,
            num_key_value_heads=3, max_position_embeddings=64, tie_word_embeddings=True,
        )
    )  # fmt: skip


def adapted() -> Any:
    model = get_peft_model(plain(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def settings(output: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "max_steps": 6, "learning_rate": 1e-2,
        "weight_decay": 0.1, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2,
        "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, **more,
    }  # fmt: skip


def rate(predicted: Any) -> dict[str, float]:
    return {"hits": float((predicted.predictions == predicted.label_ids).mean()), "sum": predicted.predictions.sum()}


def trained(
    make: Callable[[], Any], output: Path, *, parallel: bool, resumed: Path | None = None
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The trained model's state and what was logged."""
    model = make()
    if parallel:
        parallelize(model, dist.group.WORLD)
    # The best model is the one in the middle, by what is chosen as the measure.
    chosen = TrainingArguments(
        **settings(output, load_best_model_at_end=True, metric_for_best_model="sum", greater_is_better=False),
        dataloader_num_workers=make is plain and resumed is None,
    )
    trainer = (Trainer if parallel else transformers.Trainer)(
        model=model,
        args=chosen,
        train_dataset=Noisy() if make is plain else Stream(),
        eval_dataset=Sequences(),
        compute_metrics=rate,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
    )
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    return state_of(model, parallel), logged(trainer)


def state_of(model: Any, parallel: bool) -> dict[str, Tensor]:
    return full_state_dict(model) if parallel else {name: value.clone() for name, value in model.state_dict().items()}


def logged(trainer: Any) -> list[dict[str, float]]:
    """What depends on the clock is left out."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(("runtime", "per_second"))}
        for entry in trainer.state.log_history
    ]


def assert_same(found: Any, truth: Any) -> None:
    assert found[0].keys() == truth[0].keys()
    for name in truth[0]:
        torch.testing.assert_close(found[0][name], truth[0][name], rtol=1e-4, atol=1e-5)
    assert len(found[1]) == len(truth[1])
    for ours, theirs in zip(found[1], truth[1], strict=True):
        # Rewards are a tenth of differences between log-probabilities of some tens, which float32 has to 4e-6.
        rewards = {name for name in theirs if name.startswith("rewards/")}
        assert {name: ours[name] for name in rewards} == pytest.approx(
            {name: theirs[name] for name in rewards}, rel=1e-5, abs=4e-7
        )
        assert ours == pytest.approx(theirs | {name: ours[name] for name in rewards}, rel=1e-5)


MODELS = {"plain": plain, "adapted": adapted}


def on_ranks(folder: Path, names: list[str]) -> dict[str, list[Any]]:
    """For each model: trained, and resumed from what ranks have saved, and for one from what one process has."""
    multiprocessing.set_start_method("fork", force=True)  # as in a script: a loader's worker would import all anew
    ends = {}
    for name in names:
        make = MODELS[name]
        ends[name] = [trained(make, folder / f"{name}-ranks", parallel=True)]
        for saved in ("ranks", "one") if make is plain else ("ranks",):
            resumed = folder / f"{name}-{saved}" / "checkpoint-4"
            ends[name].append(trained(make, folder / f"{name}-again", parallel=True, resumed=resumed))
    return ends


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ["plain"]),
        pytest.param(2, ["plain", "adapted"], marks=pytest.mark.nightly),
        pytest.param(3, ["plain", "adapted"], marks=pytest.mark.nightly),
    ],
)
def test_a_trainer_gives_what_one_process_gives(ranks: int, names: list[str], tmp_path: Path) -> None:
    truth = {name: trained(MODELS[name], tmp_path / f"{name}-one", parallel=False) for name in names}
    ends = run_trainer_ranks(on_ranks, ranks, tmp_path, names)
    for name in names:
        make = MODELS[name]
        resumed, crossed = (
            trained(make, tmp_path / "again", parallel=False, resumed=tmp_path / f"{name}-{saved}" / "checkpoint-4")
            for saved in ("one", "ranks")
        )
        assert_same(crossed, resumed)
        for of_rank in ends:
            assert_same(of_rank[name][0], truth[name])
            for found in of_rank[name][1:]:
                assert_same(found, resumed)
    # What the model learned is far more than what the comparison allows, and the gradients were clipped.
    start, (end, history) = plain().state_dict(), truth["plain"]
    assert (end["lm_head.weight"] - start["lm_head.weight"]).abs().max() > 1e-2
    assert min(entry["grad_norm"] for entry in history if "grad_norm" in entry) > 0.5


def refusals(folder: Path) -> dict[str, str]:
    """What is said of models and settings that do not go together, and what accelerate has recorded afterwards."""
    said = refused(folder)
    gc.collect()
    return {**said, "processes afterwards": str(PartialState().num_processes)}


def refused(folder: Path) -> dict[str, str]:
    model = plain()
    said = {"whole": _said(lambda: Trainer(model=model, args=TrainingArguments(**settings(folder))))}
    parallelize(model, dist.group.WORLD)
    for name in ("fp16", "auto_find_batch_size", "gradient_checkpointing"):
        chosen = TrainingArguments(**settings(folder))
        setattr(chosen, name, True)
        said[name] = _said(lambda chosen=chosen: Trainer(model=model, args=chosen))
    chosen = TrainingArguments(**settings(folder, optim="adafactor"))
    adafactor = Trainer(model=model, args=chosen, train_dataset=Sequences(), eval_dataset=Sequences())
    said["optimizer"] = _said(adafactor.train)
    batch = {**Sequences()[dist.get_rank()]}
    said["batches"] = _said(lambda: adafactor.training_step(model, {name: row[None] for name, row in batch.items()}))
    chosen = TrainingArguments(**settings(folder, eval_strategy="no", save_strategy="no", max_steps=4))
    said["losses"] = _said(OwnLoss(model=model, args=chosen, train_dataset=Sequences()).train)
    parallelize(model := plain(), dist.group.WORLD)
    said["drift"] = _said(Drifting(model=model, args=chosen, train_dataset=Sequences()).train)
    (folder / "other").mkdir(exist_ok=True)
    said["no files"] = _said(lambda: adafactor.load_weights(str(folder / "other")))
    said["processes"] = str(PartialState().num_processes)
    return said


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_cannot_work_is_said(tmp_path: Path) -> None:
    said = run_trainer_ranks(refusals, 2, tmp_path)[0]
    assert "TypeError: Trainer takes a model that lightning_autotp.parallelize(" in said["whole"]
    assert "ValueError: TrainingArguments(fp16) does not work with a parallel model" in said["fp16"]
    assert "one rank would start again" in said["auto_find_batch_size"]
    assert "model.gradient_checkpointing_enable() before parallelize" in said["gradient_checkpointing"]
    assert "ValueError" in said["optimizer"]
    assert "Adafactor" in said["optimizer"]
    assert "a batch of step 0 differs between the ranks of a tensor-parallel group" in said["batches"]
    assert "RuntimeError: a tensor that every rank of a tensor-parallel group has whole has become" in said["drift"]
    assert "rank 1: model.norm.weight, of norm" in said["drift"]
    assert "RuntimeError: the ranks of a tensor-parallel group have different losses" in said["losses"]
    assert "(of a batch of step 1)" in said["losses"]
    assert "has no *.safetensors files" in said["no files"]
    assert (said["processes"], said["processes afterwards"]) == ("1", "2")


# --- TRL ---

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456"


def tokenizer() -> PreTrainedTokenizerFast:
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {word: number for number, word in enumerate([*LETTERS, *special.values()])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def by_trl(kind: str, output: Path, *, parallel: bool) -> tuple[dict[str, Tensor], list[dict[str, float]], str]:
    """The trained model's state, what was logged, and what is said of a head of which a rank has a part."""
    import datasets
    import trl

    data = datasets.Dataset.from_list(
        [
            {"prompt": LETTERS[i : i + 5], "completion": LETTERS[i + 5 : i + 8 + i % 4]}
            if kind == "SFT"
            else {
                "prompt": LETTERS[i : i + 5],
                "chosen": LETTERS[i + 5 : i + 8 + i % 4],
                "rejected": LETTERS[i : i + 3],
            }
            for i in range(20)
        ]
    )
    base = getattr(trl, f"{kind}Trainer")
    derived = type("Derived", (AutoTPTrainerMixin, base), {}) if parallel else base

    def trainer(keep_whole: tuple[str, ...]) -> Any:
        made = {"model": plain(), **({"ref_model": plain()} if kind == "DPO" else {})}
        if parallel:
            for model in made.values():
                parallelize(model, dist.group.WORLD, keep_whole=keep_whole)
        # Adam would divide gradients that are nearly zero by themselves, and with them what ranks round otherwise.
        given = settings(output, gradient_checkpointing=False, adam_epsilon=1e-4)
        chosen = getattr(trl, f"{kind}Config")(**given)
        return derived(**made, args=chosen, train_dataset=data, eval_dataset=data, processing_class=tokenizer())

    said = _said(lambda: trainer(())) if parallel else ""
    ready = trainer(("lm_head*",))
    ready.train()
    return state_of(ready.model, parallel), logged(ready), said


def both_by_trl(folder: Path) -> list[Any]:
    return [by_trl(kind, folder / f"{kind}-ranks", parallel=True) for kind in ("SFT", "DPO")]


@pytest.mark.nightly
def test_trainers_of_trl_give_what_one_process_gives(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL needs Python 3.11")
    found = run_trainer_ranks(both_by_trl, 2, tmp_path)[0]
    for kind, (*ends, said) in zip(("SFT", "DPO"), found, strict=True):
        assert_same(ends, by_trl(kind, tmp_path / f"{kind}-one", parallel=False))
        assert "keep_whole=['lm_head.weight']" in said or "keep_whole=['model.embed_tokens.weight']" in said
        written = json.loads((tmp_path / f"{kind}-ranks" / "checkpoint-6" / "trainer_state.json").read_text())
        assert written["global_step"] == 6
