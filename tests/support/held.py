"""What a training step holds on the second device, beside what its rehearsal says."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch
from second_device import NAME, MostAllocated, allocated
from tiny import tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_autotp import meta_model, parallelize
from lightning_autotp.building.repeated_blocks import checkpoint_blocks, offload_blocks
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.planning.estimate import host_memory, memory
from lightning_autotp.planning.recommend import Kept
from lightning_autotp.planning.rehearsal import OPTIMIZERS, Precision, local_model, rehearse

SIZES = {
    "hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 2048,
}  # fmt: skip


class Way(NamedTuple):
    """How a model is trained.

    Attributes:
        copies: of the model; the other ranks share each of them.
        precision: as the Trainer has it.
        kept: the strategy's ``activation_checkpointing``.
        cpu_offload: whether what FSDP2 shards is in host memory.
        rows: of a batch. There are few tokens in each, so that the device's own attention is of no account.
        frozen: whether only vectors are trained: with few gradients the forward pass holds the most.
    """

    copies: int
    precision: Precision = "32-true"
    kept: Kept = None
    cpu_offload: bool = True
    rows: int = 48
    frozen: bool = False


WAYS = (
    Way(1),
    Way(1, kept="offload"),
    Way(1, kept="offload", cpu_offload=False),
    Way(2),
    Way(2, kept="offload"),
    Way(2, "bf16-mixed", "blocks"),
    Way(2, rows=1),
    Way(2, cpu_offload=False),
    Way(2, cpu_offload=False, rows=1, frozen=True),
)
IN_CI = (Way(2, "bf16-mixed", "blocks"),)
"""The one with the most at once; the others are for nightly tests."""


class Held(NamedTuple):
    """Bytes of the device at most, and of the host's parameters, gradients and states: real ones, and as said."""

    device: tuple[float, float]
    host: tuple[float, float]


def held(way: Way) -> Held:
    """What this process's third step holds. Collective over two processes."""
    gc.collect()
    before = allocated()  # by other tests
    ranks = 2 // way.copies
    mesh = init_device_mesh(NAME, (way.copies, ranks), mesh_dim_names=("data", "tensor"))
    tokens = torch.randint(3, SIZES["vocab_size"], (way.rows, 8))
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    with meta_model():
        model: nn.Module = tiny_model("llama", **SIZES)
    whole = tiny_model("llama", **SIZES)
    autocast = torch.bfloat16 if way.precision == "bf16-mixed" else None
    for each in (model, whole):
        for parameter in each.parameters():
            parameter.requires_grad_(not way.frozen or parameter.dim() == 1)
    _keep(model, way.kept)
    parallelize(
        model.train(), mesh["tensor"].get_group(), example_inputs=batch, tokens_per_step=(way.rows, 8),
        plan_cache=False, device=torch.device(NAME, 0), autocast=autocast, cpu_offload=way.cpu_offload,
        data_mesh=mesh["data"] if way.copies > 1 or way.cpu_offload else None,
    )  # fmt: skip
    here = {name: value.to(NAME) if isinstance(value, Tensor) else value for name, value in batch.items()}
    on_host = way.cpu_offload
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained) if on_host else OPTIMIZERS["adamw"](trained)

    def passes() -> None:
        with torch.autocast(NAME, torch.bfloat16, enabled=autocast is not None):
            loss = model(**here).loss
        loss.backward()

    for _ in range(2):
        passes()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    with MostAllocated() as most:
        passes()
        stored = [each for parameter in model.parameters() for each in (parameter, parameter.grad)]
        stored += [leaf for state in optimizer.state.values() for leaf in state.values()]
        optimizer.step()
    inputs = sum(value.nbytes for value in here.values() if isinstance(value, Tensor))
    local = local_model(whole, parallel_state(model).plan if ranks > 1 else None, mesh.get_local_rank("tensor"))
    _keep(local, way.kept)
    said = rehearse(local, batch, precision=way.precision)
    # What blocks keep is gone by now.
    kept = said.kept_on_host.bytes + (0 if way.copies > 1 or on_host else said.kept_on_host.fixed_bytes)
    return Held(
        (most.bytes - before - inputs, memory(said, 1, way.copies, cpu_offload=on_host).total),
        (
            float(sum(_local(each).nbytes for each in stored if each is not None and each.device.type == "cpu")),
            host_memory(said, 1, way.copies, on_host) - kept,
        ),
    )


def _keep(model: nn.Module, kept: Kept) -> None:
    if kept == "blocks":
        checkpoint_blocks(model)
    elif kept == "offload":
        offload_blocks(model)


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
