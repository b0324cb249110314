"""Smoke tests on two GPUs: what no CPU shows. Skipped where there are none; nothing here has run on one yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_model, token_batch
from torch import multiprocessing

from lightning_autotp import full_gradients, parallelize

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def train(rank: int, address: str, whole: Any, batch: Any, expected: dict[str, Any]) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=address, rank=rank, world_size=2)
    try:
        model = whole.cuda()
        parallelize(model, torch.distributed.group.WORLD, device=f"cuda:{rank}", plan_cache=False)  # type: ignore[arg-type]
        loss = model(**{name: tensor.cuda() for name, tensor in batch.items()}).loss
        loss.backward()
        torch.testing.assert_close(loss.cpu(), expected["loss"], rtol=1e-4, atol=1e-5)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient.cpu(), expected[name], rtol=1e-3, atol=1e-5, msg=name)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_loss_and_gradients_are_those_of_the_cpu(family: str, tmp_path: Any) -> None:
    whole, batch = tiny_model(family), token_batch(3)
    loss = whole(**batch).loss
    loss.backward()
    expected = {"loss": loss.detach(), **{name: p.grad for name, p in whole.named_parameters()}}
    whole.zero_grad()
    multiprocessing.spawn(train, (f"file://{tmp_path}/store", whole, batch, expected), nprocs=2)
