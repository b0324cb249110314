"""Models with adapters, and tuning them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from training import Task
from transformers import AutoModelForCausalLM, GPT2Config

from lightning_autotp import full_gradients

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# With init_lora_weights=False the second factor is not zero: it hides nothing.
CASES: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": LINEARS, "use_rslora": True, "task_type": "CAUSAL_LM"},
    "dora": {"target_modules": LINEARS, "use_dora": True, "init_lora_weights": False},
    "saved modules": {
        "target_modules": ["q_proj", "up_proj", "embed_tokens"],
        "modules_to_save": ["lm_head"],
        "init_lora_weights": False,
    },
    "transposed": {
        "target_modules": ["c_attn", "c_proj", "c_fc"],
        "fan_in_fan_out": True,
        "init_lora_weights": False,
    },
    "loaded": {},
}


def transposed_config() -> GPT2Config:
    """GPT-2: its linears keep their weights transposed."""
    return GPT2Config(
        vocab_size=67, n_embd=48, n_head=6, n_layer=1, n_positions=16, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def base_model(case: str, folder: Path) -> Any:
    if case == "transposed":
        return AutoModelForCausalLM.from_config(transposed_config())
    return AutoModelForCausalLM.from_pretrained(folder / "source").train()


def adapted(case: str, folder: Path) -> PeftModel:
    base = base_model(case, folder)
    if case == "loaded":
        return PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True)
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, **CASES[case]))


class Tuning(Task):
    """Trains what PEFT leaves trainable."""

    learning_rate = 0.1

    def __init__(self, case: str, folder: str) -> None:
        super().__init__("none")
        self.case, self.folder = case, Path(folder)

    def build(self) -> Any:
        return adapted(self.case, self.folder)

    def on_after_backward(self) -> None:
        parallel = any(hasattr(module, "autotp") for module in self.modules())
        grads = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}
        self.seen["gradients"].append(full_gradients(self) if parallel else grads)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # With Adam a gradient that is zero but for rounding moves its weight as much as any other.
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.learning_rate, momentum=0.9)


class Prefix(Tuning):
    """Learns keys and values of tokens before the first."""

    def __init__(self, folder: str) -> None:
        super().__init__("lora", folder)

    def build(self) -> Any:
        return get_peft_model(
            base_model("lora", self.folder), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step({**batch, "attention_mask": torch.ones_like(batch["input_ids"])}, batch_idx)


class Preference(Tuning):
    """Learns which of two texts is the better one (DPO), by an adapter; the model itself is the reference, too.

    Args:
        reference: ``"disabled"``: without its adapter; ``"adapter"``: with another one.
        is_first: whether the reference is called first.
        recomputes: whether transformers computes activations again in the backward pass.
        folder: where the base model is.
    """

    def __init__(self, reference: str, is_first: bool, recomputes: bool, folder: str) -> None:
        super().__init__("lora", folder)
        self.reference, self.is_first, self.recomputes = reference, is_first, recomputes

    def build(self) -> Any:
        config = LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False)
        model = get_peft_model(base_model("lora", self.folder), config)
        if self.reference == "adapter":
            model.add_adapter("reference", config)
            model.set_adapter("default")
        if self.recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        return model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.is_first:
            wanted = self.referred(batch)
            found = self.log_probability(batch)
        else:
            found = self.log_probability(batch)
            wanted = self.referred(batch)
        better, worse = (found - wanted).chunk(2)
        loss = -F.logsigmoid(better - worse).mean()
        self.seen["losses"].append(loss.item())
        return loss

    @torch.no_grad()
    def referred(self, batch: dict[str, Tensor]) -> Tensor:
        if self.reference == "disabled":
            with self.model.disable_adapter():
                return self.log_probability(batch)
        self.model.set_adapter("reference")
        found = self.log_probability(batch)
        self.model.set_adapter("default")
        return found

    def log_probability(self, batch: dict[str, Tensor]) -> Tensor:
        """Of a token of each row, on average."""
        ids = batch["input_ids"]
        said = self.model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return said.gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1)
