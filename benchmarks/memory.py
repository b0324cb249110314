"""Memory of a training step by kind: measured in real processes, beside what a rehearsal on fake tensors says.

    python benchmarks/memory.py                     # docs/memory-measured.md, in a few minutes
    python benchmarks/memory.py --only Llama --page /dev/stdout

Both count storages with the same meter, the real ones of a step that two or four processes take on the processor after
two others, and those of one that is rehearsed. No GPU is needed, nor said anything of: allocators round and cache.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from lightning_autotp import meta_model, parallelize
from lightning_autotp.building.repeated_blocks import checkpoint_blocks
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.planning.meter import MOVING, Meter
from lightning_autotp.planning.rehearsal import (
    OPTIMIZERS,
    Quantization,
    bitsandbytes_config,
    local_model,
    rehearse,
)
from lightning_autotp.quantized.noted import note_quantization
from lightning_autotp.quantized.weight import QuantizedWeight

PAGE = Path(__file__).parent.parent / "docs" / "memory-measured.md"
DESCRIBED = {"weight.quant_state.bitsandbytes__nf4", "weight_format"}
"""What bitsandbytes writes into a checkpoint of a weight that is no tensor in memory."""

KINDS = ("parameters", "gradients", "states", "kept", "peak", "update")


@dataclass(frozen=True)
class Case:
    """A model and how it is trained.

    Attributes:
        family: its model type.
        build: the class of transformers that builds it.
        sizes: its config.
        ranks: tensor-parallel ones.
        copies: of the model.
        sequence_parallel: whether tokens are sharded between regions.
        checkpointing: whether blocks are computed again in the backward pass.
        lora: rank of an adapter; 0 for none.
        quantize: how the adapter's base is quantized; empty if it is not.
        precision: as the Trainer has it.
        passes: forward and backward passes of a step, of which the last is measured.
    """

    family: str
    build: str = "AutoModelForCausalLM"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    copies: int = 1
    sequence_parallel: bool = False
    checkpointing: bool = False
    lora: int = 0
    quantize: str = ""
    precision: Any = "32-true"
    passes: int = 1

    def model(self, device: str = "meta") -> nn.Module:
        """The model; without weights on meta, and where each rank is to quantize its part."""
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.family, **self.sizes)
        dtype = torch.bfloat16 if self.precision == "bf16-true" else torch.float32
        with meta_model() if self.quantize and device != "meta" else torch.device(device):
            model: Any = getattr(transformers, self.build).from_config(config, dtype=dtype)
            if self.quantize:
                note_quantization(model, quantization(self.quantize, self.precision))
            if self.lora:
                from peft import LoraConfig, get_peft_model

                model = get_peft_model(model, LoraConfig(r=self.lora, target_modules="all-linear"))
        found: nn.Module = model.to(dtype)  # the adapters, as the Trainer's precision casts them
        return found

    def batch(self) -> dict[str, Any]:
        """Rows as a training step gets them."""
        if "image_size" in self.sizes:
            size = self.sizes["image_size"]
            return {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.randint(0, 2, (4,))}
        tokens = torch.randint(3, self.sizes["vocab_size"], (2, 192))
        batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
        return batch | ({"use_cache": False} if "CausalLM" in self.build or "Seq2Seq" in self.build else {})


def quantization(name: str, precision: Any) -> Any:
    """A ``quantization_config``."""
    if name in get_args(Quantization):
        return bitsandbytes_config(cast(Quantization, name), precision)
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
DENSE = {"hidden_size": 256, "vocab_size": 4096, "intermediate_size": 896, "num_hidden_layers": 4, **HEADS}
EXPERTS = {
    **DENSE,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "experts_implementation": "grouped_mm",
}
LATENT = {
    **DENSE, "num_key_value_heads": 8, "head_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "q_lora_rank": 96, "kv_lora_rank": 64, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "first_k_dense_replace": 1,
    "experts_implementation": "grouped_mm",
}  # fmt: skip
LINEAR = {
    **EXPERTS, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "shared_expert_intermediate_size": 128,
}  # fmt: skip
MAMBA = {
    **DENSE, "attn_layer_indices": [1, 3], "mamba_n_heads": 16, "mamba_d_head": 32, "mamba_n_groups": 4,
    "mamba_d_state": 32, "mamba_chunk_size": 64,
}  # fmt: skip
BERT = {
    "hidden_size": 256, "vocab_size": 4096, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
T5 = {
    "d_model": 256, "d_kv": 32, "d_ff": 896, "num_layers": 3, "num_heads": 8, "vocab_size": 4096, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "pad_token_id": 0, "is_encoder_decoder": True,
}  # fmt: skip
VIT = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "image_size": 112,
    "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
CASES = {
    "Llama, TP=1": Case("llama", sizes=DENSE, ranks=1),
    "Llama, TP=2": Case("llama", sizes=DENSE),
    "Llama, TP=4": Case("llama", sizes=DENSE, ranks=4),
    "Llama, TP=3, uneven": Case("llama", sizes=DENSE, ranks=3),
    "Llama, sequence parallel": Case("llama", sizes=DENSE, sequence_parallel=True),
    "Llama, checkpointing": Case("llama", sizes=DENSE, checkpointing=True),
    "Llama, checkpointing and sequence parallel": Case(
        "llama", sizes=DENSE, checkpointing=True, sequence_parallel=True
    ),
    "Llama, 3 passes": Case("llama", sizes=DENSE, passes=3),
    "Llama, 3 passes, checkpointing, bf16-mixed": Case(
        "llama", sizes=DENSE, passes=3, checkpointing=True, precision="bf16-mixed"
    ),
    "Llama, LoRA": Case("llama", sizes=DENSE, lora=8),
    "Llama, LoRA, bf16-true": Case("llama", sizes=DENSE, lora=8, precision="bf16-true"),
    "Llama, LoRA on nf4, bf16-true": Case("llama", sizes=DENSE, lora=8, quantize="nf4", precision="bf16-true"),
    "Llama, LoRA on nf4, bf16-true, checkpointing, few words": Case(
        "llama",
        sizes=DENSE | {"vocab_size": 64, "intermediate_size": 4096},
        lora=8,
        quantize="nf4",
        precision="bf16-true",
        checkpointing=True,
    ),
    "Llama, LoRA on nf4": Case("llama", sizes=DENSE, lora=8, quantize="nf4"),
    "Llama, LoRA on int8, bf16-true": Case("llama", sizes=DENSE, lora=8, quantize="int8", precision="bf16-true"),
    "Llama, LoRA on torchao's int8, bf16-true": Case(
        "llama", sizes=DENSE, lora=8, quantize="torchao int8", precision="bf16-true"
    ),
    "Llama, LoRA on nf4, TP=2 x 2 copies": Case("llama", sizes=DENSE, lora=8, quantize="nf4", copies=2),
    "Llama, bf16-true": Case("llama", sizes=DENSE, precision="bf16-true"),
    "Llama, bf16-mixed": Case("llama", sizes=DENSE, precision="bf16-mixed"),
    "Llama, long vocabulary (loss in parts)": Case("llama", sizes=DENSE | {"vocab_size": 100_000}),
    "Qwen3-MoE": Case("qwen3_moe", sizes=EXPERTS),
    "Qwen3-MoE, sequence parallel": Case("qwen3_moe", sizes=EXPERTS, sequence_parallel=True),
    "Qwen3-MoE, TP=4": Case("qwen3_moe", sizes=EXPERTS, ranks=4),
    "Qwen3-MoE, 3 passes": Case("qwen3_moe", sizes=EXPERTS, passes=3),
    "DeepSeek-V3 (MLA)": Case("deepseek_v3", sizes=LATENT),
    "DeepSeek-V3 (MLA), TP=4": Case("deepseek_v3", sizes=LATENT, ranks=4),
    "DeepSeek-V3 (MLA), sequence parallel, checkpointing": Case(
        "deepseek_v3", sizes=LATENT, sequence_parallel=True, checkpointing=True
    ),
    "Qwen3-Next (linear attention)": Case("qwen3_next", sizes=LINEAR),
    "Bamba (Mamba 2)": Case("bamba", sizes=MAMBA),
    "Bamba (Mamba 2), TP=4": Case("bamba", sizes=MAMBA, ranks=4),
    "Bamba (Mamba 2), checkpointing": Case("bamba", sizes=MAMBA, checkpointing=True),
    "BERT": Case("bert", "AutoModelForMaskedLM", BERT),
    "BERT, TP=4, checkpointing": Case("bert", "AutoModelForMaskedLM", BERT, ranks=4, checkpointing=True),
    "T5": Case("t5", "AutoModelForSeq2SeqLM", T5),
    "ViT": Case("vit", "AutoModelForImageClassification", VIT),
    "ViT, TP=4": Case("vit", "AutoModelForImageClassification", VIT, ranks=4),
    "Llama, TP=2 x 2 copies": Case("llama", sizes=DENSE, copies=2),
}
Found = dict[str, int]
"""Bytes by :data:`KINDS`."""


class RealMeter(Meter):
    """A meter of a real step, which also knows how often tokens choose experts of this rank.

    Attributes:
        choices: of all experts, as far as this rank asks which ones are of its own.
        chosen: of its own.
    """

    choices = chosen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.nonzero.default and args[0].dtype == torch.bool:
            self.choices += args[0].numel()
            self.chosen += len(result)
        return result


def measure(case: Case) -> tuple[Found, Found]:
    """What this process's third step holds, and what its rehearsal says. Collective."""
    torch.manual_seed(1)
    batch = case.batch()
    model = case.model("cpu").train()
    if case.checkpointing:
        checkpoint_blocks(model)
    plan, rank = None, 0
    if case.ranks > 1:
        sizes = (case.copies, case.ranks)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        parallelize(
            model,
            mesh["tensor"].get_group(),
            example_inputs=batch,
            tokens_per_step=(2, 192) if "input_ids" in batch else None,
            sequence_parallel=case.sequence_parallel,
            plan_cache=False,
            data_mesh=mesh["data"] if case.copies > 1 else None,
        )
        plan, rank = parallel_state(model).plan, mesh.get_local_rank("tensor")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS["adamw"](trained)
    for _ in range(2):
        _loss(model, batch, case).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = [leaf for state in optimizer.state.values() for leaf in state.values() if isinstance(leaf, Tensor)]
    parameters = sum(_stored(parameter) for parameter in model.parameters())
    states = sum(_local(state).nbytes for state in held)
    with RealMeter(model) if case.copies == 1 else nullcontext() as meter:
        if meter is not None:
            meter.label(held, "states")
        for _ in range(case.passes - 1):
            _loss(model, batch, case).backward()
        if meter is not None:
            meter.held.restart_peaks()
        loss = _loss(model, batch, case)
        _settle(case)  # what is not kept for the backward pass goes
        kept = 0
        if meter is not None:
            meter.relabel("other", "activations")
            kept = meter.held.live["activations"] + meter.held.live["copies"] + meter.held.live["dequantized"]
        loss.backward()
        del loss
        gradients = sum(_local(each.grad).nbytes for each in trained if each.grad is not None)
        peak = update = 0
        if meter is not None:
            peak = sum(meter.held.peak[label] for label in MOVING)
            _settle(case)  # and what is not part of what the optimizer begins with, to be freed while it steps
            before = meter.held.live["other"] + meter.held.live["copies"] + meter.held.live["activations"]
            meter.held.restart_peaks()
            optimizer.step()
            most = meter.held.peak_without_gradients
            update = most["other"] + most["copies"] + most["activations"] - before
    real = dict(zip(KINDS, (parameters, gradients, states, kept, peak, update), strict=True))
    local = local_model(case.model(), plan, rank)
    if case.checkpointing:
        checkpoint_blocks(local)
    share = case.ranks * meter.chosen / meter.choices if meter is not None and meter.choices else 1.0
    said = rehearse(local, batch, precision=case.precision, imbalance=share)
    most = said.peak
    if case.passes > 1:  # gradients of earlier ones are there from the beginning
        most = Counter({**said.peak_without_gradients, "gradients": said.gradients})
    expected = {
        "parameters": said.quantized + said.divided // case.copies,
        "gradients": said.gradients // case.copies,
        "states": said.states // case.copies,
        "kept": said.activations + said.copies + said.dequantized if case.copies == 1 else 0,
        "peak": sum(most[label] for label in MOVING) if case.copies == 1 else 0,
        "update": said.update if case.copies == 1 else 0,
    }
    return real, expected


def _settle(case: Case) -> None:
    """Free what only a cycle of references keeps alive, and let gloo's threads free what they have sent."""
    gc.collect()
    if case.ranks > 1:
        dist.barrier()
        time.sleep(0.1)


def _loss(model: nn.Module, batch: dict[str, Any], case: Case) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16-mixed"):
        loss: Tensor = model(**batch).loss
    return loss


def _stored(parameter: nn.Parameter) -> int:
    """Bytes of a parameter; of one that is quantized those of the library's layer."""
    if isinstance(parameter, QuantizedWeight):
        kept = [tensor for name, tensor in parameter.layer.state_dict().items() if name not in DESCRIBED]
        return sum(part.nbytes for tensor in kept for part in _parts(tensor))
    return _local(parameter).nbytes


def _parts(tensor: Any) -> list[Tensor]:
    """The tensors that one of torchao's consists of."""
    return (
        [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if type(tensor) is not Tensor else [tensor]
    )


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _rank(rank: int, world: int, case: Case, directory: str, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world, timeout=timedelta(minutes=5)
    )
    try:
        results.put((rank, *measure(case)))
    finally:
        dist.destroy_process_group()


def run(case: Case) -> tuple[Found, Found]:
    """Measured and said, of the first rank."""
    with tempfile.TemporaryDirectory() as directory:
        results = mp.get_context("spawn").SimpleQueue()
        world = case.ranks * case.copies
        mp.spawn(_rank, (world, case, directory, results), nprocs=world)
        found = sorted((results.get() for _ in range(world)), key=lambda each: int(each[0]))
    return found[0][1], found[0][2]


def to_markdown(found: Mapping[str, tuple[Found, Found]]) -> str:
    """The page: measured MiB, and by how much the rehearsal is off."""
    lines = [
        INTRODUCTION,
        "",
        f"| | {' | '.join(KINDS)} |",
        f"| --- |{' ---: |' * len(KINDS)}",
    ]
    for name, (real, said) in found.items():
        cells = []
        for kind in KINDS:
            off = (said[kind] - real[kind]) / real[kind] if real[kind] else 0.0
            cells.append(f"{real[kind] / 2**20:.2f} ({off:+.1%})" if real[kind] or said[kind] else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """# Memory of a training step: rehearsed and measured

MiB that the first rank holds in a training step with AdamW (2 rows of 192 tokens, or 4 pictures; four layers of width
256; float32 where nothing else is said), measured in real processes on the processor, and in brackets by how much the
rehearsal of [`lightning-autotp recommend`](recommend.md) is off. Written by `python benchmarks/memory.py`.

* *kept*: what the forward pass keeps for the backward pass, at its end.
* *peak*: the most that is there at once besides parameters and optimizer states: kept, gradients, what an operator, the
  loss or a collective needs for a moment.
* *update*: what the optimizer's step needs for a moment (it takes all parameters at once, as on a GPU).
* Mixtures: the rehearsal is told which share of the tokens the real router sent to the experts of the rank. With an
  even share for each rank the rows of Qwen3-MoE and DeepSeek-V3 are up to 4 % off, and `recommend` expects a quarter
  more than that, for the rank with the most.
* *passes*: gradients of the passes before the last are there while it runs.
* *LoRA on nf4*, *int8*: adapters on a base that bitsandbytes has quantized; *few words*: 64, and layers of width 4096,
  so that the most is there where a layer is multiplied.

With copies, FSDP2 gathers into memory that it keeps and resizes, which the meter does not follow: only what is stored
is compared. What is gathered, and what is left on a device with parameters or activations in host memory, the tests
measure on a device that stands in for a GPU and counts what is allocated (`tests/support/held.py`)."""


def main(only: list[str] | None = None, page: Path = PAGE) -> None:
    """Measure and write the page.

    Args:
        only: parts of the names of cases.
        page: where to write it; ``/dev/stdout`` prints it.
    """
    found = {}
    for name, case in CASES.items():
        if only is None or any(part in name for part in only):
            try:
                found[name] = run(case)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[-2500:]}", flush=True)
            else:
                print(name, *found[name], sep="\n  ", flush=True)
    text = to_markdown(found)
    page.write_text(text)


if __name__ == "__main__":
    auto_cli(main)
