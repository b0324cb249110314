"""Fine-tune a real language model with tensor parallelism: ``python examples/finetune.py --help``.

By default SmolLM2-135M-Instruct learns the Python reference manual on two processes: on GPUs if there are two, else on
the CPU. Its 9 query heads and 3 key/value heads are sharded over them as 6 and 3, and 2 and 1. In ``--output-dir`` are
then

* ``metrics.csv`` and ``loss.png``: every step's training loss, and with ``--compare`` that of one process;
* ``checkpoint.ckpt``: a Lightning checkpoint, to resume from on any number of processes;
* ``model/``: a Hugging Face directory, in which nothing tells how it was trained.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from history import History, draw, largest_difference, read_losses
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from smollm2 import NAME, model_directory
from task import Finetune, TextData
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from lightning_autotp import AutoTPStrategy

console = Console(width=None if sys.stdout.isatty() else 120)


class PlanTable(Callback):
    """Prints how the model was cut, before the first step."""

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for module in pl_module.modules():
            state = getattr(module, "autotp", None)
            if state is not None:
                console.print(state.plan.table())
                return


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        description="Fine-tune a causal language model with tensor parallelism.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = options.add_argument
    flag = argparse.BooleanOptionalAction
    add("--model", default=NAME, help=f"Hub id or directory; {NAME!r} is SmolLM2-135M-Instruct from a package")
    add("--text", help="a text file to train on; default: the Python reference manual")
    add("--devices", type=int, default=2, help="processes, each with its GPU where there are enough")
    add("--tensor-parallel-size", type=int, help="ranks that share one copy of the model; default: all")
    add("--accelerator", default="auto", help="Lightning's; auto takes GPUs if there is one for each process")
    add("--precision", default="32-true", help="Lightning's")
    add("--max-steps", type=int, default=20)
    add("--batch-size", type=int, default=4, help="blocks in a batch")
    add("--sequence-length", type=int, default=256, help="tokens in a block")
    add("--learning-rate", type=float, default=1e-4)
    add("--seed", type=int, default=0)
    add("--output-dir", type=Path, default=Path("runs/finetune"))
    add("--compare", action=flag, default=False, help="train in one process first and draw its losses too")
    add("--strategy", choices=["autotp", "auto"], default="autotp", help="auto: Lightning's own, for one process")
    add("--save", action=flag, default=True, help="write the checkpoint and the Hugging Face directory")
    return options


def strategy(options: argparse.Namespace) -> Strategy | str:
    """The strategy the options ask for; ``"autotp"`` alone would do where its defaults are right."""
    if options.strategy == "autotp" and options.tensor_parallel_size is not None:
        data_parallel_size = max(1, options.devices // options.tensor_parallel_size)
        return AutoTPStrategy(options.tensor_parallel_size, data_parallel_size)
    return str(options.strategy)


def accelerator(options: argparse.Namespace) -> str:
    """``"auto"``, but the CPU where there are too few GPUs for the processes."""
    if options.accelerator == "auto" and torch.accelerator.is_available():
        found = torch.accelerator.device_count()
        if found < options.devices:
            print(f"{options.devices} processes, but {found} accelerator(s): training on the CPU")
            return "cpu"
    return str(options.accelerator)


def train_in_one_process(options: argparse.Namespace) -> list[float]:
    """The losses of the same training with Lightning's own strategy, in a process of its own."""
    directory = options.output_dir / "one-process"
    replicas = max(1, options.devices // (options.tensor_parallel_size or options.devices))
    console.print("the same training in one process, to compare with", style="bold")
    again = ["--strategy", "auto", "--devices", "1", "--no-compare", "--no-save", "--output-dir", str(directory)]
    again += ["--batch-size", str(options.batch_size * replicas)]  # the blocks that all replicas take in a step
    subprocess.run([sys.executable, __file__, *sys.argv[1:], *again], check=True)
    return read_losses(directory / "metrics.csv")


def train(options: argparse.Namespace, history: History) -> L.Trainer:
    """The training itself: nothing but Lightning."""
    L.seed_everything(options.seed, verbose=False)
    trainer = L.Trainer(
        accelerator=accelerator(options),
        devices=options.devices,
        strategy=strategy(options),
        precision=options.precision,
        max_steps=options.max_steps,
        max_epochs=options.max_steps,  # an epoch has a step at least
        callbacks=[PlanTable(), history, RichProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data = TextData(options.model, options.text, options.sequence_length, options.batch_size, options.seed)
    trainer.fit(Finetune(options.model, options.learning_rate), data)
    return trainer


def save(trainer: L.Trainer, options: argparse.Namespace) -> None:
    """Write the checkpoint and the Hugging Face directory. Collective: every rank has a part of the weights."""
    trainer.save_checkpoint(options.output_dir / "checkpoint.ckpt", weights_only=False)
    directory = options.output_dir / "model"
    if isinstance(trainer.strategy, AutoTPStrategy):
        trainer.strategy.save_pretrained(directory)
    else:
        model: Any = trainer.lightning_module.model
        model.save_pretrained(directory)
    if trainer.is_global_zero:
        AutoTokenizer.from_pretrained(model_directory(options.model)).save_pretrained(directory)


def continuation(directory: Path, prompt: str, tokens: int = 30) -> str:
    """What the saved model says, loaded as anybody would.

    Raises:
        RuntimeError: if the weights in the directory are not exactly the model's.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    model, findings = loaded
    wrong = {kind: keys for kind, keys in findings.items() if keys}
    if wrong:
        raise RuntimeError(f"the model saved in {directory} does not load cleanly: {wrong}")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def report(options: argparse.Namespace, history: History, reference: list[float] | None) -> None:
    """Write the losses and the picture, and say how it went."""
    history.write(options.output_dir / "metrics.csv")
    draw(options.output_dir / "loss.png", f"{options.devices} processes, {options.strategy}", history.losses, reference)
    few = max(1, min(5, len(history.losses) // 2))
    first, last = (sum(part) / few for part in (history.losses[:few], history.losses[-few:]))
    console.print(f"loss {first:.3f} -> {last:.3f} (means of the first and last {few} of {len(history.losses)} steps)")
    if reference is not None:
        difference = largest_difference(history.losses, reference)
        console.print(f"largest relative difference of a loss from one process's: {difference:.2e}")


def main() -> None:
    """Train, save, report. Lightning starts this script again for every further rank."""
    options = parser().parse_args()
    logging.disable_progress_bar()  # every rank would draw its own
    options.output_dir.mkdir(parents=True, exist_ok=True)
    first = getattr(rank_zero_only, "rank", 0) == 0
    reference = train_in_one_process(options) if options.compare and first else None
    if first:
        model_directory(options.model)  # prepared once, before the other ranks start
    history = History(console)
    trainer = train(options, history)
    if options.save:
        save(trainer, options)
    if trainer.is_global_zero:
        report(options, history, reference)
        if options.save:
            console.print(continuation(options.output_dir / "model", 'The "with" statement is used to'), markup=False)
        console.print(f"written to {options.output_dir}/", highlight=False)


if __name__ == "__main__":
    main()
