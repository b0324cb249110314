"""Hugging Face directories from Lightning checkpoints: the very files that the run itself would have written."""

from __future__ import annotations

import gc
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from exported import (
    MB,
    TOKENIZER,
    Odd,
    OddConfig,
    assert_same_files,
    contents,
    message,
    tiny_llama,
    weights,
    write_tokenizer,
)
from lightning.pytorch.utilities.types import STEP_OUTPUT
from loading import peak_of
from safetensors.torch import load_file
from torch import Tensor, nn
from trainer_ranks import run_trainer_ranks
from training import Task, loader, tiny_config, trainer
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_autotp import AutoTPStrategy, export_checkpoint
from lightning_autotp.building.checkpoint_reading import (
    CheckpointError,
    DamagedFileError,
    MismatchError,
    MissingFileError,
)
from lightning_autotp.cli import main
from lightning_autotp.export import from_model
from lightning_autotp.export.from_model import describe_models


class Two(Task):
    """A student and its teacher."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model, self.teacher = self.build(), self.build()
            self.head = nn.Linear(2, 2)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> STEP_OUTPUT:
        loss: Tensor = self.model(**batch).loss + self.teacher(**batch).loss + self.head.weight.sum()
        return loss


def train_and_save(root: str) -> str:
    """Checkpoints of both kinds from two copies on two ranks, and what the strategy exports at that moment."""
    folder = Path(root)
    trained = Task(str(folder / "source"))
    for kind in ("file", "directory"):
        strategy = AutoTPStrategy(2, 2, save_distributed_checkpoint=kind == "directory")
        fitting = trainer(strategy, 4, max_steps=2)
        fitting.fit(trained, loader())
        fitting.save_checkpoint(folder / f"{kind}.ckpt")
        fitting.strategy.save_pretrained(folder / f"{kind} exported", max_shard_size="20KB")
    fitting = trainer(AutoTPStrategy(2, 2), 4, max_steps=1)
    task = Two("config")
    fitting.fit(task, loader())
    fitting.save_checkpoint(folder / "two.ckpt")
    for prefix in ("model", "teacher"):
        fitting.strategy.save_pretrained(folder / f"{prefix} exported", model=getattr(task, prefix))
    return message(fitting.strategy.save_pretrained, folder / "neither")


def large_checkpoint(rank: int, world_size: int, root: str) -> tuple[int, int, int]:
    """Memory to export a checkpoint of 270 MB whose largest tensor has 64 MB."""
    with torch.device("meta"):  # which numbers are in it does not matter, and to draw them takes long
        model = LlamaForCausalLM(tiny_config_of(8192))
    state = {f"model.{name}": torch.ones_like(value, device="cpu") for name, value in model.state_dict().items()}
    moments = {"state": {0: {"exp_avg": torch.ones(8192, 4096)}}, "param_groups": []}
    checkpoint = {"state_dict": state, "optimizer_states": [moments], from_model.ENTRY: describe_models(Holder(model))}
    torch.save(checkpoint, Path(root) / "large.ckpt")
    sizes = [value.nbytes for value in model.parameters()]
    del model, state, checkpoint, moments
    gc.collect()
    export_checkpoint(Path(root) / "file.ckpt", Path(root) / "warm")
    _, peak = peak_of(lambda: export_checkpoint(Path(root) / "large.ckpt", Path(root) / "large"))
    return peak, max(sizes), sum(sizes)


class Holder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def tiny_config_of(width: int) -> Any:
    config = tiny_config()
    config.vocab_size, config.hidden_size, config.num_attention_heads, config.head_dim = 2048, width, 2, 16
    config.intermediate_size, config.num_hidden_layers = 512, 2
    return config


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that four ranks wrote."""
    directory = tmp_path_factory.mktemp("checkpoints")
    write_tokenizer(directory / "source")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config()).save_pretrained(directory / "source")
    for error in run_trainer_ranks(train_and_save, 4, str(directory)):
        assert error.startswith("ValueError: Two has 2 Hugging Face models: name one")
    return directory


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_checkpoint_becomes_the_same_directory(saved: Path, tmp_path: Path, kind: str) -> None:
    exported = export_checkpoint(saved / f"{kind}.ckpt", tmp_path / "out", max_shard_size="20KB")
    assert_same_files(tmp_path / "out", saved / f"{kind} exported")
    assert set(exported.tokenizer) == TOKENIZER
    assert len(exported.weights) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    untrained = AutoModelForCausalLM.from_pretrained(saved / "source")
    assert not torch.equal(loaded.lm_head.weight, untrained.lm_head.weight)


@pytest.mark.parametrize("loaded", [True, False])
def test_experts_in_a_checkpoint_are_split_again(tmp_path: Path, loaded: bool) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_local_experts=3))
    if loaded:
        model.save_pretrained(tmp_path / "source")
        model = MixtralForCausalLM.from_pretrained(tmp_path / "source")
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    assert any(value.dim() == 3 for value in state.values())
    torch.save({"state_dict": state, from_model.ENTRY: describe_models(Holder(model))}, tmp_path / "c.ckpt")
    export_checkpoint(tmp_path / "c.ckpt", tmp_path / "ours", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


def command(monkeypatch: pytest.MonkeyPatch, *words: object, name: str = "export") -> str:
    """Run a command; the message that it ends with."""
    monkeypatch.setattr(sys, "argv", ["lightning-autotp", name, *map(str, words)])
    try:
        main()
    except SystemExit as end:
        return str(end.code)
    return "done"


def test_the_command(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (saved / "file.ckpt", tmp_path / "half", "--max-shard-size", "20KB", "--dtype=bfloat16")
    assert command(monkeypatch, *words) == "done"
    printed = capsys.readouterr().out
    assert f" KiB in {len(weights(tmp_path / 'half'))} file(s)" in printed
    assert "tokenizer: additional_chat_templates, chat_template.jinja, merges.txt" in printed
    AutoModelForCausalLM.from_pretrained(saved / "file exported", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "theirs", max_shard_size="20KB"
    )
    assert weights(tmp_path / "half") == weights(tmp_path / "theirs")
    for prefix in ("model", "teacher"):
        assert command(monkeypatch, saved / "two.ckpt", tmp_path / prefix, "--prefix", prefix) == "done"
        assert "no tokenizer: " in capsys.readouterr().out
        assert_same_files(tmp_path / prefix, saved / f"{prefix} exported")


def test_what_was_written_is_checked(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"file.ckpt": "the file", "directory.ckpt": r"\d+ tensors", "file exported": r"\d+ files"}
    for name, what in kinds.items():
        assert command(monkeypatch, saved / name, name="check") == "done"
        assert re.search(rf"{name}: as written \({what}\)", capsys.readouterr().out)
        copy = tmp_path / name
        if (saved / name).is_dir():
            shutil.copytree(saved / name, copy)
            file = max(copy.iterdir(), key=lambda file: file.stat().st_size)
        else:
            file = Path(shutil.copy(saved / name, copy))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        said = command(monkeypatch, copy, name="check")
        assert said.startswith("lightning-autotp check: ")
        assert file.name in said
    assert "is not a checkpoint, or an incomplete one" in command(monkeypatch, tmp_path, name="check")


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    checkpoint = torch.load(source, weights_only=True)
    changed = change(checkpoint)
    torch.save(checkpoint if changed is None else changed, target)
    return target


def test_a_checkpoint_of_another_strategy(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(checkpoint: dict[str, Any]) -> None:
        del checkpoint[from_model.ENTRY]
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"net.inner.{name.removeprefix('model.')}": state[name] for name in state}

    path = rewritten(saved / "file.ckpt", tmp_path / "plain.ckpt", plain)
    assert "does not say which model it is of" in command(monkeypatch, path, tmp_path / "a")
    assert command(monkeypatch, path, tmp_path / "b", "--model", saved / "source") == "done"
    assert set(contents(tmp_path / "b")) == {"model.safetensors"} | {
        name for name in contents(saved / "file exported") if not name.startswith("model")
    }
    wanted = AutoModelForCausalLM.from_pretrained(saved / "file exported").state_dict()
    for name, value in load_file(tmp_path / "b" / "model.safetensors").items():
        assert torch.equal(value, wanted.pop(name)), name
    assert not wanted
    assert "choose the attribute path" in command(
        monkeypatch, saved / "two.ckpt", tmp_path / "c", "--model", saved / "source"
    )


def test_tied_weights_that_are_stored_once(tmp_path: Path) -> None:
    model = tiny_llama(True)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    entry = describe_models(Holder(model))
    for name, dropped in (
        ("both", None),
        ("one", "model.lm_head.weight"),
        ("other", "model.model.embed_tokens.weight"),
    ):
        kept = {key: value for key, value in state.items() if key != dropped}
        torch.save({"state_dict": kept, from_model.ENTRY: entry}, tmp_path / f"{name}.ckpt")
        export_checkpoint(tmp_path / f"{name}.ckpt", tmp_path / name)
    model.save_pretrained(tmp_path / "theirs")
    for name in ("both", "one", "other"):
        assert_same_files(tmp_path / name, tmp_path / "theirs")


def test_checkpoints_that_cannot_be_exported(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, out = saved / "file.ckpt", tmp_path / "out"
    with pytest.raises(MissingFileError, match=r"none\.ckpt does not exist"):
        export_checkpoint(tmp_path / "none.ckpt", out)
    (tmp_path / "cut.ckpt").write_bytes(good.read_bytes()[:20000])
    with pytest.raises(DamagedFileError, match="cannot be read, it may be damaged"):
        export_checkpoint(tmp_path / "cut.ckpt", out)
    (tmp_path / "text.ckpt").write_text("no checkpoint\n" * 10)
    with pytest.raises(DamagedFileError, match="it may be damaged or be something else"):
        export_checkpoint(tmp_path / "text.ckpt", out)
    torch.save({"state_dict": {}, "task": SimpleNamespace()}, tmp_path / "objects.ckpt")
    with pytest.raises(CheckpointError, match=r"SimpleNamespace\); .*safe_globals.*--weights-only false") as refused:
        export_checkpoint(tmp_path / "objects.ckpt", out)
    assert type(refused.value) is CheckpointError  # the file is not damaged
    with monkeypatch.context() as context:
        gone = ModuleType("gone")
        gone.Settings = type("Settings", (), {"__module__": "gone"})  # type: ignore[attr-defined]
        context.setitem(sys.modules, "gone", gone)
        torch.save({"state_dict": {}, "task": gone.Settings()}, tmp_path / "gone.ckpt")
    with pytest.raises(CheckpointError, match=r"\(gone\.Settings\), and one of them is not there: No module named"):
        export_checkpoint(tmp_path / "gone.ckpt", out, weights_only=False)
    with pytest.raises(ValueError, match="does not say which model it is of"):
        export_checkpoint(tmp_path / "objects.ckpt", out, weights_only=False)
    (tmp_path / "folder").mkdir()
    with pytest.raises(MissingFileError, match="is not a checkpoint, or an incomplete one"):
        export_checkpoint(tmp_path / "folder", out)
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    with pytest.raises(DamagedFileError, match="is not a Lightning checkpoint"):
        export_checkpoint(tmp_path / "other.ckpt", out)

    def damage(checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["model.stranger"] = state.pop("model.model.norm.weight")
        state["model.lm_head.weight"] = state["model.lm_head.weight"][:5].clone()

    with pytest.raises(MismatchError) as misfit:
        export_checkpoint(rewritten(good, tmp_path / "misfit.ckpt", damage), out)
    assert str(misfit.value).splitlines()[1:4] == [
        "  missing: model.norm.weight",
        "  unexpected: stranger",
        "  wrong shape: lm_head.weight is (5, 32), the configuration gives (67, 32)",
    ]
    with pytest.raises(MismatchError, match=r"and \d+ more"):
        export_checkpoint(saved / "two.ckpt", out, prefix="model.model", model=str(saved / "source"))
    with pytest.raises(ValueError, match=r"has 2 models: choose one of them with --prefix \(model, teacher\)"):
        export_checkpoint(saved / "two.ckpt", out)
    with pytest.raises(ValueError, match=r"has no model 'student': --prefix must be one of model, teacher"):
        export_checkpoint(saved / "two.ckpt", out, prefix="student")

    def other_class(checkpoint: dict[str, Any]) -> None:
        checkpoint[from_model.ENTRY]["models"]["model"]["class"] = "os.system"

    with pytest.raises(ValueError, match=r"is of a os\.system, which transformers .* does not have"):
        export_checkpoint(rewritten(good, tmp_path / "class.ckpt", other_class), out)
    with pytest.raises(ValueError, match="has none of the files of a tokenizer"):
        export_checkpoint(good, out, tokenizer=tmp_path)
    assert not out.exists()
    with pytest.raises(FileExistsError, match="exists and is not an empty directory"):
        export_checkpoint(good, tmp_path)
    assert "is no floating-point dtype" in command(monkeypatch, good, out, "--dtype", "int8")
    assert "is not an empty directory" in command(monkeypatch, good, good)


def test_a_checkpoint_is_read_one_tensor_at_a_time(saved: Path) -> None:
    ((peak, largest, total),) = run_ranks(large_checkpoint, 1, str(saved))
    bound = largest + 32 * MB
    assert bound < total // 2, "else this proves nothing"
    assert peak < bound


def test_what_a_checkpoint_says_of_its_models() -> None:
    module = nn.ModuleDict({"a": Holder(tiny_llama(True)), "b": nn.Linear(2, 2), "odd": Odd(OddConfig())})
    models = describe_models(module)["models"]
    assert list(models) == ["a.model", "odd"]
    assert models["a.model"]["class"] == "LlamaForCausalLM"
    assert models["a.model"]["config"]["tie_word_embeddings"]
    assert models["a.model"]["generation_config"]["max_new_tokens"] == 23
    assert models["a.model"]["source"] is None
    assert models["odd"]["generation_config"] is None
    assert json.loads(json.dumps(models)) == models
