"""Runs on the second device with parameters in host memory, each beside the same run without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from copies import FORMATS
from lightning import Fabric
from lightning.pytorch.plugins import MixedPrecision
from second_device import BACKEND, NAME, SecondDevice
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from training import error_of

from lightning_autotp import (
    AutoTPFabricStrategy,
    AutoTPStrategy,
    WholeMatrixOptimizer,
    clip_gradients_norm,
    full_gradients,
    full_state_dict,
    full_tensor,
    meta_model,
    parallelize,
    penalty,
)

STEPS = 4

HALF = STEPS // 2


class Offloaded(L.LightningModule):
    """A model, with a scalar and a vector outside of it, that stay on the device; it writes down what is where."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"losses": []}

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.temperature = nn.Parameter(torch.tensor(1.5))
            self.model = tiny_model("llama")
            self.shift = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        output = self.model(**batch, use_cache=False)
        gathered = self.model.lm_head.weight  # from here to the end of the backward pass
        self.seen["computed on"] = {each.device.type for each in (output.logits, gathered, self)}
        loss: Tensor = output.loss * self.temperature * self.shift.sum()
        self.seen["losses"].append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        length = {"max_new_tokens": 3, "min_new_tokens": 3}
        written = self.model.generate(batch["input_ids"], do_sample=False, **length)
        loss = self.model(input_ids=written, labels=written, use_cache=False).loss
        self.seen["losses"].append(loss.item())

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.seen["gradients"] = full_gradients(self)
        self.seen["gradients on"] = places(
            (name, parameter.grad) for name, parameter in self.named_parameters() if parameter.grad is not None
        )

    def on_fit_end(self) -> None:
        self.seen["weights"] = full_state_dict(self)
        self.seen["parameters on"] = places(self.named_parameters())
        (optimizer,) = self.trainer.optimizers
        self.seen["states on"] = places(
            (f"{key} of {name}", optimizer.state[parameter][key])
            for name, parameter in self.named_parameters()
            for key in ("exp_avg", "exp_avg_sq")
            if parameter in optimizer.state
        )

    def configure_optimizers(self) -> Optimizer:
        # Not lists of tensors at once, in which torch refuses DTensors among others.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)


def places(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[bool, str]]:
    """Whether each is sharded by FSDP2, and on which device it is."""
    return {name: (isinstance(tensor, DTensor), tensor.device.type) for name, tensor in tensors}


def rows(count: int) -> DataLoader[Any]:
    data = [{key: value[0] for key, value in token_batch(seed).items()} for seed in range(count)]
    return DataLoader(data, batch_size=2)  # type: ignore[arg-type]


def trained(offload: bool, options: dict[str, Any], save: Path | None = None, **given: Any) -> Any:
    L.seed_everything(3, verbose=False)
    strategy = AutoTPStrategy(**options, cpu_offload=offload)
    path = given.pop("ckpt_path", None)
    trainer = L.Trainer(
        accelerator=SecondDevice(), devices=2, strategy=strategy, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **{"max_steps": STEPS, "gradient_clip_val": 0.5, **given},
    )  # fmt: skip
    task = Offloaded()
    trainer.fit(task, rows(2 * STEPS * strategy.data_ranks), ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    return task.seen


def used_again(offload: bool) -> Any:
    """A model is evaluated, which leaves some parameters gathered, and trained on."""
    L.seed_everything(3, verbose=False)
    task = Offloaded()
    for epochs in (1, 2):
        trainer = L.Trainer(
            accelerator=SecondDevice(), devices=2, strategy=AutoTPStrategy(2, 1, cpu_offload=offload),
            max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(task, rows(4), rows(4))
        trainer.validate(task, rows(4), verbose=False)
    return task.seen


def in_fabric(offload: bool, folder: Path, half: Path | None = None) -> Any:
    """Some steps, the first half of which may be loaded; their end is saved."""
    fabric = Fabric(accelerator=SecondDevice(), devices=2, strategy=AutoTPFabricStrategy(1, 2, cpu_offload=offload))
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    with fabric.init_module():
        made = tiny_model("llama")
    model, optimizer = fabric.setup(made, torch.optim.AdamW(made.parameters(), lr=1e-2))
    if half is not None:
        fabric.load(half, {"model": model, "optimizer": optimizer})
    losses = []
    batches = list(fabric.setup_dataloaders(rows(4 * STEPS)))
    for batch in batches[:HALF] if half is None else batches[HALF:STEPS]:
        loss = model(**batch, use_cache=False).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        gradients = full_gradients(model)
        optimizer.zero_grad()
        losses.append(loss.item())
    end = folder / f"fabric {offload}.ckpt"
    if half is None:
        fabric.save(end, {"model": model, "optimizer": optimizer})
    states = ((name, optimizer.state[parameter]["exp_avg"]) for name, parameter in model.named_parameters())
    found = {"parameters on": places(model.named_parameters()), "states on": places(states)}
    return {"losses": losses, "gradients": gradients, "weights": full_state_dict(model), **found}


def in_a_loop(offload: bool) -> Any:
    """With parameters used past FSDP2, and an optimizer of whole tensors on both devices."""
    mesh = init_device_mesh(NAME, (2, 1), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(5)
    with meta_model():
        model = tiny_model("llama")
    parallelize(model, mesh["tensor"].get_group(), data_mesh=mesh["data"], cpu_offload=offload)
    module = nn.ModuleDict({"model": model, "outside": nn.Linear(4, 4).to(NAME)})
    matrices = [*model.model.layers.parameters(), *module["outside"].parameters()]
    names = [name for name, _ in model.named_parameters() if ".layers." not in name]
    whole = WholeMatrixOptimizer(module, matrices, torch.optim.SGD, lr=0.1, momentum=0.9)
    adam = torch.optim.AdamW([model.get_parameter(name) for name in names], lr=1e-2)
    losses = []
    for step in range(3):
        batch = {name: tensor.to(NAME) for name, tensor in token_batch(2 * step + mesh.get_rank()).items()}
        loss = model(**batch, use_cache=False).loss + 0.1 * penalty(model, lambda name, p: p.square())
        head = full_tensor(model, "lm_head.weight")
        assert head.device.type == NAME
        loss = loss + 0.1 * head.norm(dim=1).sum() + module["outside"].weight.square().sum()
        loss.backward()
        gradients = full_gradients(module)
        norm = clip_gradients_norm(module, 1.0)
        whole.step()
        adam.step()
        module.zero_grad()
        losses += [loss.item(), norm.item()]
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": full_state_dict(module),
        "parameters on": places(module.named_parameters()),
        "states on": places((name, adam.state[model.get_parameter(name)]["exp_avg"]) for name in names),
    }


COPIES = {"tensor_parallel_size": 1, "data_parallel_size": 2}
RUNS: dict[str, Callable[[bool], Any]] = {
    "copies": lambda offload: trained(offload, COPIES),
    "one copy": lambda offload: trained(offload, {"tensor_parallel_size": 2, "data_parallel_size": 1}),
    "accumulation": lambda offload: trained(offload, COPIES, accumulate_grad_batches=2, gradient_clip_val=None),
    "bf16-mixed": lambda offload: trained(offload, COPIES, plugins=[MixedPrecision("bf16-mixed", NAME)]),
    "used again": used_again,
    "loop": in_a_loop,
}


def errors() -> dict[str, str]:
    """What does not go with it."""
    scaled = MixedPrecision("16-mixed", NAME, torch.amp.GradScaler(NAME))
    alone = dist.new_group(backend=f"{NAME}:{BACKEND}")
    mesh = init_device_mesh(NAME, (2,), mesh_dim_names=("data",))
    return {
        "scaled": error_of(trained, True, COPIES, plugins=[scaled]),
        "no mesh": error_of(parallelize, tiny_model("llama"), dist.group.WORLD, cpu_offload=True),
        "device alone": error_of(parallelize, tiny_model("llama"), alone, data_mesh=mesh, cpu_offload=True),
    }


def with_and_without(directory: str, names: list[str]) -> dict[str, Any]:
    """Each run of these names without and with it, and what goes on from a checkpoint of the other."""
    folder = Path(directory)
    seen: dict[str, Any] = {
        name: [run(offload) for offload in (False, True)] for name, run in RUNS.items() if name in names
    }
    for kind, options in FORMATS.items():
        if f"resumed from a {kind}" not in names:
            continue
        sizes = {**COPIES, **options}
        paths = [folder / f"{kind} {offload}.ckpt" for offload in (False, True)]
        for offload, path in zip((False, True), paths, strict=True):
            trained(offload, sizes, path, max_steps=HALF)
        seen[f"resumed from a {kind}"] = [
            trained(offload, sizes, ckpt_path=path)
            for offload, path in zip((False, True), reversed(paths), strict=True)
        ]
    if "Fabric" in names:
        seen["Fabric"] = [in_fabric(offload, folder) for offload in (False, True)]
        seen["Fabric, resumed"] = [
            in_fabric(offload, folder, folder / f"fabric {not offload}.ckpt") for offload in (False, True)
        ]
    return {**seen, "errors": errors()}
