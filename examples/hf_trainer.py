"""transformers' ``Trainer`` on a model that ``parallelize`` has divided: one class more, the rest stays.

torchrun --nproc-per-node 2 examples/hf_trainer.py --max_steps 20

TRL's ``SFTTrainer`` and ``DPOTrainer`` take the same mixin. They compute from the head's weight, which must then be
whole: ``parallelize(model, group, keep_whole=["lm_head*"])``.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import transformers
from jsonargparse import auto_cli
from smollm2 import NAME, model_directory
from task import TextData

from lightning_autotp import AutoTPTrainerMixin, meta_model, parallelize


class Trainer(AutoTPTrainerMixin, transformers.Trainer):
    """Every rank trains as if it were alone, on the batches that one process would get."""


def main(
    model: str = NAME,
    text: str | None = None,
    output_dir: str = "runs/hf_trainer",
    max_steps: int = 20,
    learning_rate: float = 1e-4,
    sequence_length: int = 256,
    batch_size: int = 4,
    resume_from_checkpoint: str | None = None,
) -> None:
    """Fine-tune a model on a text.

    Args:
        model: Hub id or directory; "smollm2" is the SmolLM2-135M-Instruct that comes from a package.
        text: a text file; by default the Python reference manual.
        output_dir: where the Trainer's checkpoints go.
        max_steps: optimizer steps.
        learning_rate: AdamW's.
        sequence_length: tokens in a block.
        batch_size: blocks in a batch; there are two batches in a step.
        resume_from_checkpoint: one of the checkpoints, of any number of ranks.
    """
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)

    with meta_model():  # no weights are read here
        local = transformers.AutoModelForCausalLM.from_pretrained(model_directory(model), dtype=torch.float32).train()
    world = dist.group.WORLD
    assert world is not None
    parallelize(local, world, device=device)  # each rank reads its slices

    data = TextData(model, text, sequence_length, batch_size)
    data.setup("fit")
    settings = transformers.TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size=batch_size,  # of the one copy of the model
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        max_steps=max_steps,
        learning_rate=learning_rate,
        logging_steps=1,
        save_steps=max(1, max_steps // 2),
        report_to=[],
        use_cpu=not on_gpu,
    )
    trainer = Trainer(model=local, args=settings, train_dataset=data.train_dataloader().dataset)
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    auto_cli(main)
