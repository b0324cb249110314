"""What a combination of options trains: its model, data, loss and optimizer, and what is kept of a run to compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from combinations import FAMILIES, Combination
from kernel_stand_ins import FLASH_2, installed_flash_attention, installed_flex_attention
from quantized import whole_weights
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BitsAndBytesConfig
from zoo.inputs import training_batch
from zoo.models import build, stir

from lightning_autotp import WholeMatrixOptimizer, full_gradients, full_state_dict
from lightning_autotp.building.repeated_blocks import repeated_blocks
from lightning_autotp.losses import kl_divergence, token_log_probs

STEPS_OF_EPOCH = 2
EPOCHS = 2

NEW_TOKENS = 4

ROUNDED_TO = {"32-true": torch.float32, "float64": torch.float64, "16-mixed": torch.float16}
"""What a precision rounds to, where that is not bfloat16."""

_IN_FLOAT64 = 2.0**-30
"""By how much weights are off then: finer than float32, but models that compute parts in float32 feel it."""

_OF_BLOCKS = {"hidden_size": 128, "intermediate_size": 320}
"""Sizes of a base that is quantized: rows of whole blocks of 64, two and five of them."""


# --- the model ---


def new_model(combination: Combination) -> Any:
    """The family's tiny model, the same at each call."""
    group, name, changes = _sizes(combination)
    if combination.tied != "default":
        changes = {**changes, "tie_word_embeddings": combination.tied == "yes"}
    torch.manual_seed(5)
    model = build(name, group, **changes)
    stir(model)
    if combination.precision == "float64":  # which is no precision of the Trainer's with several ranks
        model.double()
    return model.train()


def _sizes(combination: Combination) -> tuple[str, str, dict[str, Any]]:
    group, name, changes = FAMILIES[combination.family]
    return group, name, changes if combination.base == "plain" else {**changes, **_OF_BLOCKS}


def adapted_model(combination: Combination, folder: Path) -> Any:
    """The model as the options say, of the directory in ``folder`` or made anew."""
    model = new_model(combination)
    if combination.source == "directory":
        how: dict[str, Any] = {"dtype": "auto"}
        if combination.base != "plain":
            how = {"quantization_config": _quantization(combination.base), "dtype": torch.float32}
        model = type(model).from_pretrained(folder / "source", **how).train()
    if combination.attention == "eager":
        model.set_attn_implementation(combination.attention)
    elif combination.attention != "default":  # without asking for what the kernels need
        model.config._attn_implementation = combination.attention
    if combination.checkpointing == "own":
        model.gradient_checkpointing_enable()
    if combination.adapter != "none":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=4, target_modules="all-linear", use_dora=combination.adapter == "dora", init_lora_weights=False,
            # PEFT refuses the first two of Mamba's, and routers return tuples.
            exclude_modules=["out_proj", "conv1d", "router"],
        )  # fmt: skip
        torch.manual_seed(6)
        model = get_peft_model(model, config)
    for parameter in _frozen(combination, model):
        parameter.requires_grad_(False)
    return model


def _quantization(base: str) -> Any:
    if base == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    if base == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _frozen(combination: Combination, model: Any) -> list[nn.Parameter]:
    parameters = list(model.parameters())
    return {
        "nothing": [],
        "embeddings": list(embeddings(model).parameters()) if combination.frozen == "embeddings" else [],
        "half": parameters[::2],
        "beginning": parameters[: len(parameters) // 2],
        "vectors": [parameter for parameter in parameters if parameter.ndim == 1],
        "matrices": [parameter for parameter in parameters if parameter.ndim > 1],
    }[combination.frozen]


def embeddings(model: Any) -> nn.Module:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # of pictures and sounds: whatever comes first
        return next(module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)


def make_noisy(combination: Combination, model: nn.Module, noise: int) -> None:
    """Move the weights by what the precision rounds them to."""
    generator = torch.Generator().manual_seed(noise)
    rounding = torch.finfo(ROUNDED_TO.get(combination.precision, torch.bfloat16)).eps / 2
    if combination.precision == "float64":
        rounding = _IN_FLOAT64
    with torch.no_grad():
        for parameter in model.parameters():
            if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
                continue  # it is quantized
            by = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * rounding
            parameter.copy_(parameter.double() * (1 + by))


def compile_in_place(combination: Combination, model: nn.Module) -> None:
    """As the options say, with a backend that takes no time to compile."""
    torch._dynamo.reset()
    compiled = {"none": [], "blocks": list(repeated_blocks(model)), "whole": [model]}[combination.compile]
    for module in compiled:
        module.compile(backend="aot_eager")


@contextmanager
def kernels(combination: Combination) -> Iterator[None]:
    """What stands in for kernels that need a GPU."""
    if combination.attention == FLASH_2:
        with installed_flash_attention():
            yield
    elif combination.attention == "flex_attention":
        with installed_flex_attention():
            yield
    else:
        yield


# --- the data ---


def batches(combination: Combination) -> list[list[dict[str, Any]]]:
    """Of an epoch: each a batch for each copy."""
    group, name, changes = _sizes(combination)
    with torch.device("meta"):
        config = build(name, group, **changes).config

    def batch(number: int, copy: int) -> dict[str, Any]:
        made = training_batch(name, group, config, 1 + number * combination.copies + copy)
        if combination.padded:
            made["attention_mask"] = torch.ones_like(made["input_ids"])
            made["attention_mask"][1, -5:] = 0
            made["labels"][1, -5:] = -100
        if number > 0 and combination.shapes == "tokens":
            made = {key: value[:, :13].contiguous() for key, value in made.items()}
        if number > 0 and combination.shapes == "rows":
            made = {key: value[:2] for key, value in made.items()}
        if combination.precision == "float64":
            made = {key: value.double() if value.is_floating_point() else value for key, value in made.items()}
        return made

    return [
        [batch(number, copy) for copy in range(combination.copies)]
        for number in range(STEPS_OF_EPOCH * combination.accumulate)
    ]


# --- what is done with the model ---


def loss_of(combination: Combination, model: Any, batch: list[dict[str, Any]]) -> Tensor:
    return torch.stack([_loss(combination, model, part) for part in batch]).mean()


def _loss(combination: Combination, model: Any, batch: dict[str, Any]) -> Tensor:
    kind = combination.loss
    if kind == "own":
        return model(**batch).loss
    labels = batch["labels"]
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    if combination.group == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    if kind == "log-probs":
        return -token_log_probs(logits, labels).mean()
    if kind == "divergence":
        return kl_divergence(logits, logits.detach() * 0.5).mean()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1 if kind == "smoothed" else 0.0)
    return loss + 1e-2 * logits.logsumexp(-1).square().mean() if kind == "z-loss" else loss


def written(model: Any, part: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What a model writes after the beginning of each row: tokens ``[rows, new]``, and the logits that they are of."""
    prompt = part["input_ids"][:, :9]
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0  # as a shorter prompt is padded
    output = model.generate(
        input_ids=prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return output.sequences[:, -NEW_TOKENS:].clone(), torch.stack(output.logits, 1).float()


def optimizer_of(combination: Combination, module: nn.Module, model: Any) -> torch.optim.Optimizer:
    """Of a model, which may be within a module."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    name, _, how = combination.optimizer.partition("-")
    if name == "whole":
        name = how
    if name == "Muon":
        inside = {*map(id, embeddings(model).parameters())}
        trained = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in inside]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if combination.groups == 2:
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9} if name == "SGD" else {"lr": 3e-3}
    if how in ("fused", "foreach"):
        options[how] = True
    kind = getattr(torch.optim, name)
    if combination.optimizer.startswith("whole-"):
        return WholeMatrixOptimizer(module, groups, kind, **options)
    return kind(groups, **options)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Of the learning rate, a step after each of the optimizer's."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 3)


# --- what is kept of it ---


def nothing_seen() -> dict[str, Any]:
    return {"losses": [], "gradients": [], "evaluated": [], "written": []}


def is_parallel(module: nn.Module) -> bool:
    return any(hasattr(part, "autotp") for part in module.modules())


def whole_state(combination: Combination, module: nn.Module) -> dict[str, Tensor]:
    """A state dict, with what quantized weights stand for."""
    if is_parallel(module):
        return full_state_dict(module)
    if combination.base != "plain":
        return whole_weights(module)
    return {name: value.clone() for name, value in module.state_dict().items()}


def whole_gradients(module: nn.Module) -> dict[str, Tensor]:
    if is_parallel(module):
        return full_gradients(module)
    named = module.named_parameters(remove_duplicate=False)
    return {name: value.grad.clone() for name, value in named if value.grad is not None}
