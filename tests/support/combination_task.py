"""What trains a combination of options, on its ranks and in one process, and writes down what is compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from combinations import FAMILIES, Combination
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from zoo.inputs import training_batch
from zoo.models import build, stir

from lightning_autotp import AutoTPStrategy, WholeMatrixOptimizer, full_gradients, full_state_dict
from lightning_autotp.lightning.averaging import EMAWeightAveraging
from lightning_autotp.losses import kl_divergence, token_log_probs

STEPS_OF_EPOCH = 2
EPOCHS = 2

ROUNDED_TO = {"32-true": torch.float32, "float64": torch.float64, "16-mixed": torch.float16}
"""What a precision rounds to, where that is not bfloat16."""

_IN_FLOAT64 = 2.0**-30
"""By how much weights are off then: finer than float32, but models that compute parts in float32 feel it."""


def new_model(combination: Combination) -> Any:
    """The family's tiny model, the same at each call."""
    group, name, changes = FAMILIES[combination.family]
    if combination.tied != "default":
        changes = {**changes, "tie_word_embeddings": combination.tied == "yes"}
    torch.manual_seed(5)
    model = build(name, group, **changes)
    stir(model)
    if combination.precision == "float64":  # which is no precision of the Trainer's with several ranks
        model.double()
    return model.train()


def _model(combination: Combination, folder: Path) -> Any:
    model = new_model(combination)
    if combination.source == "directory":
        model = type(model).from_pretrained(folder / "source", dtype="auto").train()
    if combination.attention != "default":
        model.set_attn_implementation(combination.attention)
    if combination.checkpointing == "own":
        model.gradient_checkpointing_enable()
    if combination.adapter != "none":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=4, target_modules="all-linear", use_dora=combination.adapter == "dora", init_lora_weights=False,
            # PEFT refuses the first two of Mamba's, and routers return tuples.
            exclude_modules=["out_proj", "conv1d", "router"],
        )  # fmt: skip
        model = get_peft_model(model, config)
    named = list(model.named_parameters())
    frozen = {
        "nothing": [],
        "embeddings": list(_embeddings(model).parameters()) if combination.frozen == "embeddings" else [],
        "half": [parameter for _, parameter in named[::2]],
        "beginning": [parameter for _, parameter in named[: len(named) // 2]],
        "vectors": [parameter for _, parameter in named if parameter.ndim == 1],
        "matrices": [parameter for _, parameter in named if parameter.ndim > 1],
    }[combination.frozen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return model


def _embeddings(model: Any) -> nn.Module:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # of pictures and sounds: whatever comes first
        return next(module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)


class Combined(L.LightningModule):
    """A task as the options say, that writes down what is compared."""

    def __init__(self, combination: Combination, folder: Path, noise: int) -> None:
        super().__init__()
        self.combination, self.folder, self.noise = combination, folder, noise
        self.seen: dict[str, Any] = {"losses": [], "gradients": [], "evaluated": []}
        if combination.source == "ready":
            self.model = self._built()

    def _built(self) -> Any:
        dtype = torch.get_default_dtype()
        if self.combination.averaging:
            # In one process Lightning's callback builds the model, before the precision's dtype is set, and numbers
            # that are drawn in another dtype are others.
            torch.set_default_dtype(torch.float32)
        try:
            model = _model(self.combination, self.folder)
        finally:
            torch.set_default_dtype(dtype)
        if self.noise:
            generator = torch.Generator().manual_seed(self.noise)
            precision = self.combination.precision
            rounding = torch.finfo(ROUNDED_TO.get(precision, torch.bfloat16)).eps / 2
            if precision == "float64":
                rounding = _IN_FLOAT64
            with torch.no_grad():
                for parameter in model.parameters():
                    by = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * rounding
                    parameter.copy_(parameter.double() * (1 + by))
        return model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self._built()

    @property
    def is_parallel(self) -> bool:
        return any(hasattr(module, "autotp") for module in self.modules())

    def whole_state(self) -> dict[str, Tensor]:
        return full_state_dict(self) if self.is_parallel else {k: v.clone() for k, v in self.state_dict().items()}

    def on_fit_start(self) -> None:
        if not self.is_parallel:
            self.seen["before"] = self.whole_state()

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        kind = self.combination.loss
        if kind == "own":
            return self.model(**batch).loss
        labels = batch["labels"]
        logits = self.model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        if self.combination.group == "causal":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if kind == "log-probs":
            return -token_log_probs(logits, labels).mean()
        if kind == "divergence":
            return kl_divergence(logits, logits.detach() * 0.5).mean()
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1 if kind == "smoothed" else 0.0
        )
        return loss + 1e-2 * logits.logsumexp(-1).square().mean() if kind == "z-loss" else loss

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> Tensor:
        loss = torch.stack([self._loss(part) for part in batch]).mean()
        self.seen["losses"].append(loss.item())
        return loss

    def validation_step(self, batch: list[dict[str, Any]], batch_idx: int) -> None:
        self.log("evaluated", torch.stack([self._loss(part) for part in batch]).mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen["evaluated"].append(float(self.trainer.callback_metrics["evaluated"]))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if len(self.seen["gradients"]) < STEPS_OF_EPOCH:  # later steps are made without
            alone = self.named_parameters(remove_duplicate=False)
            self.seen["gradients"].append(
                full_gradients(self)
                if self.is_parallel
                else {name: value.grad.clone() for name, value in alone if value.grad is not None}
            )

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        name, _, how = self.combination.optimizer.partition("-")
        if name == "whole":
            name = how
        if name == "Muon":
            inside = {*map(id, _embeddings(self.model).parameters())}
            trained = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in inside]
        groups: list[dict[str, Any]] = [{"params": trained}]
        if self.combination.groups == 2:
            groups = [
                {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
            ]
            groups = [group for group in groups if group["params"]]
        options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9} if name == "SGD" else {"lr": 3e-3}
        if how in ("fused", "foreach"):
            options[how] = True
        kind = getattr(torch.optim, name)
        optimizer = (
            WholeMatrixOptimizer(self, groups, kind, **options)
            if self.combination.optimizer.startswith("whole-")
            else kind(groups, **options)
        )
        if not self.combination.schedule:
            return optimizer
        every_step = {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 3), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": every_step}


def batches(combination: Combination) -> list[list[dict[str, Any]]]:
    """Of an epoch: each a batch for each copy."""
    group, name, changes = FAMILIES[combination.family]
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


def trained(
    combination: Combination,
    strategy: Any,
    data: list[Any],
    folder: Path,
    *,
    start: Path | None = None,
    save: Path | None = None,
    epochs: int = EPOCHS,
    noise: int = 0,
) -> dict[str, Any]:
    """What a run saw."""
    L.seed_everything(3, verbose=False)
    alone = strategy == "auto"
    task = Combined(combination, folder, noise)
    used: list[Any] = []
    if combination.averaging:
        used.append((callbacks.EMAWeightAveraging if alone else EMAWeightAveraging)(decay=0.5))
    if save is not None:
        used.append(callbacks.ModelCheckpoint(save.parent, filename=save.stem, every_n_epochs=1))
    options: dict[str, Any] = {} if combination.precision == "float64" else {"precision": combination.precision}
    if combination.precision == "16-mixed":
        options = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))]}
    if combination.clip != "none":
        options["gradient_clip_algorithm"] = combination.clip
        options["gradient_clip_val"] = {"norm": 0.2, "value": 2e-3}[combination.clip]
    if combination.evaluation == "batch":
        options["val_check_interval"] = 1
    trainer = L.Trainer(
        accelerator="cpu", devices=1 if alone else combination.ranks, strategy=strategy, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=save is not None, callbacks=used,
        max_epochs=epochs, accumulate_grad_batches=combination.accumulate, use_distributed_sampler=False, **options,
    )  # fmt: skip
    loaders: list[Any] = [DataLoader(data, batch_size=None)]
    if combination.evaluation != "none":
        loaders.append(DataLoader(data[:1], batch_size=None))
    trainer.fit(task, *loaders, ckpt_path=start, weights_only=False)
    task.seen["after"] = task.whole_state()
    return task.seen


def two_halves(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two halves of a run as one."""
    return {
        "losses": first["losses"] + second["losses"],
        "evaluated": first["evaluated"] + second["evaluated"],
        "gradients": first["gradients"] + second["gradients"],
        "before": first.get("before"),
        "after": second["after"],
    }


def one_process(combination: Combination, folder: Path, noise: int = 0) -> dict[str, Any]:
    """What one process sees.

    Args:
        combination: what is trained.
        folder: for its checkpoints; the directory of the model is beside it.
        noise: number of a run whose weights are off by what they are rounded to; 0 for the one with the weights.
    """
    data, source = batches(combination), folder.parent
    if combination.resume == "none":
        return trained(combination, "auto", data, source, noise=noise)
    half = folder / "half.ckpt"
    first = trained(combination, "auto", data, source, save=half, epochs=EPOCHS // 2, noise=noise)
    return two_halves(first, trained(combination, "auto", data, source, start=half, noise=noise))


def on_ranks(combination: Combination, folder: Path, data: list[list[dict[str, Any]]]) -> dict[str, Any]:
    copy = int(os.environ["RANK"]) // combination.tensor_ranks
    mine = [[each[copy]] for each in data]

    def strategy() -> AutoTPStrategy:
        tokens: Any = {"no": False, "yes": True, "auto": "auto"}[combination.sequence_parallel]
        kept: Any = combination.checkpointing if combination.checkpointing in ("blocks", "offload") else None
        return AutoTPStrategy(
            combination.tensor_ranks,
            (combination.copies, 1) if combination.replicated else combination.copies,
            sequence_parallel=tokens,
            activation_checkpointing=kept,
            cpu_offload=combination.offload,
            broadcast_batches=combination.broadcast,
            save_distributed_checkpoint=combination.resume == "directory",
        )

    torch.manual_seed(int(os.environ["RANK"]))  # the strategy sees to it that ranks draw alike
    if combination.resume == "none":
        return trained(combination, strategy(), mine, folder)
    half = folder / "ranks" / "half.ckpt"
    if combination.resume == "from-one-process":
        half = folder / "alone" / "half.ckpt"
        return trained(combination, strategy(), mine, folder, start=half)
    first = trained(combination, strategy(), mine, folder, save=half, epochs=EPOCHS // 2)
    if combination.resume == "to-one-process":
        return first
    return two_halves(first, trained(combination, strategy(), mine, folder, start=half))
