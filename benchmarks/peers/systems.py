"""The systems that are compared: each makes a model ready and gives a function for the loss of a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from lightning_autotp import parallelize
from peers.megatron import MegatronLlama

Loss = Callable[[Tensor], Tensor]


@dataclass
class Prepared:
    """A model that is ready to be trained.

    Attributes:
        model: what holds its parameters.
        loss: the loss of a batch ``[rows, length]``; its backward pass gives the gradients.
        within: the context of forward and backward.
    """

    model: nn.Module
    loss: Loss
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(self, tokens: Tensor) -> float:
        """Forward and backward; the loss. Collective, but for :func:`one_process`."""
        for parameter in self.model.parameters():
            parameter.grad = None
        with self.within():
            loss = self.loss(tokens)
            loss.backward()
        return float(loss.detach())


@dataclass(frozen=True)
class Source:
    """Where a system takes the model from.

    Attributes:
        model: whole, with the same weights on every rank; to be copied.
        directory: the same, saved.
        tokens: the batch.
        device: where to compute.
    """

    model: nn.Module
    directory: Path
    tokens: Tensor
    device: torch.device

    def copy(self) -> Any:
        """A whole model of one's own."""
        return copy.deepcopy(self.model)


def one_process(source: Source) -> Prepared | None:
    """The whole model on the first rank alone."""
    if dist.get_rank():
        return None
    model = source.copy()
    return Prepared(model, lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss)


def autotp(source: Source, *, sequence_parallel: bool = False, compiled: bool = False, read: bool = False) -> Prepared:
    """This project.

    Args:
        source: the model.
        sequence_parallel: whether tokens are sharded between tensor-parallel regions.
        compiled: whether blocks are compiled.
        read: whether code asks the logits for the best word besides, so that they are computed.
    """
    batch = {"input_ids": source.tokens, "labels": source.tokens, "use_cache": False}
    group: Any = dist.group.WORLD
    model: Any = parallelize(
        source.copy(),
        group,
        example_inputs=batch,
        tokens_per_step=tuple(source.tokens.shape),  # type: ignore[arg-type]
        sequence_parallel=sequence_parallel,
        plan_cache=False,
    )
    if compiled:
        for layer in model.model.layers:
            layer.compile()

    def loss(tokens: Tensor) -> Tensor:
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
        if read:
            output.logits.argmax(-1)
        return output.loss

    return Prepared(model, loss)


def transformers_plan(source: Source) -> Prepared:
    """The ``tp_plan`` that transformers has for the model."""
    config = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(source.directory, distributed_config=config, dtype=torch.float32)
    model.train()
    return Prepared(model, lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss)


def torch_by_hand(source: Source, *, sequence_parallel: bool = False) -> Prepared:
    """``parallelize_module`` with the plan that one writes for a Llama, and torch's loss on parts of the logits."""
    model = source.copy()
    mesh = init_device_mesh(source.device.type, (dist.get_world_size(),))
    between: Any = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        plan["model.norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for layer in model.model.layers:
        of_layer: dict[str, Any] = {
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=between),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=between),
        }
        if sequence_parallel:
            of_layer["input_layernorm"] = of_layer["post_attention_layernorm"] = SequenceParallel()
            of_layer["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": between},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            of_layer["mlp"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        parallelize_module(layer, mesh, of_layer)

    def loss(tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Prepared(model, loss, loss_parallel)


def megatron_by_hand(source: Source) -> Prepared:
    """Layers written by hand for a Llama, in Megatron's pattern."""
    model = MegatronLlama(source.copy())
    return Prepared(model, model)


Make = Callable[[Source], Prepared | None]
OURS: dict[str, Make] = {
    "lightning_autotp": autotp,
    "lightning_autotp, sequence parallel": lambda source: autotp(source, sequence_parallel=True),
    "lightning_autotp, compiled": lambda source: autotp(source, compiled=True),
    "lightning_autotp, logits read": lambda source: autotp(source, read=True),
}
OF_LLAMA: dict[str, Make] = {
    "torch, parallelize_module by hand": torch_by_hand,
    "torch by hand, sequence parallel": lambda source: torch_by_hand(source, sequence_parallel=True),
    "Megatron's pattern by hand": megatron_by_hand,
}
ONE, PEER = "one process", "transformers, tp_plan"


def systems(family: str) -> dict[str, Make]:
    """The systems that can train a model of this family, by name."""
    by_hand = OF_LLAMA if family == "llama" else {}
    return {ONE: one_process, **OURS, PEER: transformers_plan, **by_hand}
