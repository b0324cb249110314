"""A training loop without Lightning: ``parallelize`` makes the model this rank's part of it, the rest is PyTorch.

torchrun --nproc-per-node 2 examples/plain_loop.py --max_steps 20
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from jsonargparse import auto_cli
from smollm2 import NAME, model_directory
from task import TextData
from transformers import AutoModelForCausalLM

from lightning_autotp import clip_gradients_norm, full_state_dict, meta_model, parallelize


def main(
    model: str = NAME,
    text: str | None = None,
    output: str = "runs/plain.pt",
    max_steps: int = 20,
    learning_rate: float = 1e-4,
    sequence_length: int = 256,
    batch_size: int = 4,
) -> None:
    """Fine-tune a model on a text.

    Args:
        model: Hub id or directory; "smollm2" is the SmolLM2-135M-Instruct that comes from a package.
        text: a text file; by default the Python reference manual.
        output: where the trained state dict goes.
        max_steps: optimizer steps.
        learning_rate: AdamW's.
        sequence_length: tokens in a block.
        batch_size: blocks in a batch.
    """
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)  # the ranks of one copy of the model must draw alike

    with meta_model():  # no weights are read here
        local = AutoModelForCausalLM.from_pretrained(model_directory(model), dtype=torch.float32).train()
    world = dist.group.WORLD
    assert world is not None
    parallelize(local, world, device=device)  # each rank reads its slices
    optimizer = torch.optim.AdamW(local.parameters(), lr=learning_rate)

    data = TextData(model, text, sequence_length, batch_size)
    data.setup("fit")
    for step, batch in zip(range(max_steps), data.train_dataloader(), strict=False):
        loss = local(**{name: values.to(device) for name, values in batch.items()}).loss
        loss.backward()
        norm = clip_gradients_norm(local, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}, gradient norm {norm.item():.4f}", flush=True)

    state = full_state_dict(local, keep=dist.get_rank() == 0)  # on every rank: it is collective
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
        torch.save(state, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    auto_cli(main)
