"""A training loop with Fabric on two ranks, and what it is compared with."""

from __future__ import annotations

import copy
import gc
import io
import os
import re
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from training import ROWS, Regression, blocks, error_of, tiny_config
from transformers import AutoModelForCausalLM

from lightning_autotp import (
    AutoTPFabricStrategy,
    WholeMatrixOptimizer,
    checked,
    full_gradients,
    full_state_dict,
    save_pretrained,
)
from lightning_autotp.parameters.state import is_parallel

STATEFUL: dict[str, Any] = {"kind": "Adagrad", "initial_accumulator_value": 0.1, "in_memory": True}
"""An optimizer that makes its state when it is made."""

STEPS = 4

HALF = STEPS // 2

CLIPS: dict[str, dict[str, Any]] = {
    "norm": {"max_norm": 0.5},
    "value": {"clip_val": 1e-3},
}


def fabric_of(strategy: Any = "auto", devices: int = 1, **options: Any) -> Fabric:
    return Fabric(accelerator="cpu", strategy=strategy, devices=devices, **options)


def two(strategy: Any = "autotp", **options: Any) -> Fabric:
    """Made and launched on one of two ranks."""
    fabric = fabric_of(strategy, 2, **options)
    fabric.launch()
    return fabric


def run(
    fabric: Fabric,
    clip: dict[str, Any] | None = None,
    kind: str = "AdamW",
    load: Any = None,
    save: Any = None,
    save_after: int = STEPS,
    steps: int = STEPS,
    skip: int = 0,
    data: Any = None,
    in_memory: bool = False,
    at_end: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """A hand-written loop: two batches a step, two groups of parameters, clipping; checkpoints before and within."""
    fabric.seed_everything(3, verbose=False)
    with nullcontext() if in_memory else fabric.init_module():
        model = AutoModelForCausalLM.from_config(tiny_config()).train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    optimizer = getattr(torch.optim, kind)(groups, **{"lr": 1e-2, **options})
    with redirect_stderr(io.StringIO()) as said:
        model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(load, state) if load else {}
    loader = fabric.setup_dataloaders(DataLoader(blocks(), batch_size=2)) if data is None else data  # type: ignore[arg-type]
    seen: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "batches": [], "loaded": (state["step"], rest)}
    seen["said"] = re.sub(r"\d+\.\d s|\d+\.\d%", "N", said.getvalue()).splitlines()
    batches = iter(loader)
    for step in range(steps):
        for is_last in (False, True):
            batch = next(batches)
            if step < skip:
                continue
            seen["batches"].append(batch["input_ids"].clone())
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = model(**batch).loss
                fabric.backward(loss / 2)
            seen["losses"].append(loss.item())
        if step < skip:
            continue
        if len(seen["gradients"]) < 2:
            named = model.module.named_parameters()
            parallel = hasattr(model, "autotp")
            seen["gradients"].append(
                full_gradients(model.module) if parallel else {n: p.grad.clone() for n, p in named}
            )
        norm = fabric.clip_gradients(model, optimizer, **(clip or CLIPS["norm"]))
        seen["norms"].append(0.0 if norm is None else norm.item())
        optimizer.step()
        optimizer.zero_grad()
        if save is not None and step + 1 == save_after:
            fabric.save(save, {"model": model, "optimizer": optimizer, "step": save_after, "notes": {"seed": 3}})
    seen["weights"] = whole(model)
    if at_end is not None:  # to be asked while the model is there
        seen["at end"] = at_end()
    return seen


def runs(fabric: Fabric, half: Path) -> dict[str, Any]:
    """A loop with each kind of clipping; the first half of that by norm is saved."""
    seen = {"norm": run(fabric, CLIPS["norm"], save=half, save_after=HALF)}
    return seen | {name: run(fabric, clip, kind="SGD") for name, clip in CLIPS.items() if name != "norm"}


def whole(model: Any) -> dict[str, Tensor]:
    state = full_state_dict(model.module) if hasattr(model, "autotp") else model.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(wanted["losses"]), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(wanted["norms"]), rtol=1e-4, atol=0)
    for mine, theirs in zip(found["gradients"], wanted["gradients"], strict=True):
        assert_close(mine, theirs)
    assert_close(found["weights"], wanted["weights"])


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        difference = (found[name] - value).norm() / value.norm().clamp(min=1e-30)
        assert difference < 1e-4, f"{name} differs by {difference:.1e}"


class Plain(nn.Module):
    """A model of one's own, whose loss is computed by the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(67, 16), nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16))
        self.head = nn.Linear(16, 67)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.net(input_ids))


IDS = torch.stack([block["input_ids"] for block in blocks()])


def own_loss(fabric: Fabric, is_copied: bool = False) -> dict[str, Any]:
    """The model is set up first, and perhaps copied, then its optimizer; a scheduler; the loss comes from logits."""
    fabric.seed_everything(5, verbose=False)
    model = Plain()
    model = fabric.setup_module(model)
    if is_copied:
        model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = fabric.setup_optimizers(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses, kinds = [], []
    for ids in IDS[:12].split(4):
        with checked(model.module) if hasattr(model, "autotp") else nullcontext():
            logits = model(ids)
            kinds.append(type(logits))
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            if is_copied:
                loss.backward()  # which Lightning refuses under strategies that do something else in theirs
            else:
                fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": [], "gradients": [], "weights": whole(model), "kinds": kinds}


def whole_matrices(fabric: Fabric, path: Path) -> dict[str, Tensor]:
    """Weights after a step with whole states, and one more of what has loaded the checkpoint in between."""
    for is_second in (False, True):
        fabric.seed_everything(5, verbose=False)
        model = fabric.setup_module(Plain())
        whole_optimizer = WholeMatrixOptimizer(model.module, model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        optimizer = fabric.setup_optimizers(whole_optimizer)
        if is_second:
            fabric.load(path, {"model": model, "optimizer": optimizer})
        fabric.backward(model(IDS[:4]).float().square().mean())
        optimizer.step()
        if not is_second:
            fabric.save(path, {"model": model, "optimizer": optimizer})
    return whole(model)


def written(fabric: Fabric) -> Tensor:
    """Tokens of ``model.generate()``, marked as Fabric asks for."""
    fabric.seed_everything(3, verbose=False)
    model = fabric.setup_module(AutoModelForCausalLM.from_config(tiny_config()).eval())
    model.mark_forward_method("generate")
    tokens: Tensor = model.generate(input_ids=IDS[:2, :5], do_sample=False, max_new_tokens=4, min_new_tokens=4)
    return tokens


def lightning_module(fabric: Fabric) -> dict[str, Any]:
    """Its model is divided; what is beside it is not."""
    fabric.seed_everything(5, verbose=False)
    task = Regression()
    with fabric.init_module():
        task.configure_model()
    model, optimizer = fabric.setup(task, task.configure_optimizers())
    for rows in fabric.setup_dataloaders(DataLoader(ROWS, batch_size=4)):  # type: ignore[arg-type]
        fabric.backward(model.training_step(rows, 0))
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    parallel = hasattr(task.net, "autotp")
    weights = full_state_dict(task) if parallel else task.state_dict()
    return {"losses": task.losses, "norms": [norm.item()], "gradients": [], "weights": weights, "parallel": parallel}


def order_of(fabric: Fabric, **options: Any) -> list[int]:
    """In which order a shuffled loader gives rows, and what workers augment them with."""
    fabric.seed_everything(4, verbose=False)
    loader = fabric.setup_dataloaders(DataLoader(range(12), batch_size=3, shuffle=True, **options))  # type: ignore[arg-type]
    assert loader.dataset == range(12)
    return [int(row) for _ in range(2) for batch in loader for row in batch]


def augmented(rows: list[Any]) -> Tensor:
    return torch.stack([row["input_ids"] for row in rows]) + torch.randint(0, 50, ())


def two_ranks(directory: str) -> dict[str, Any]:
    folder = Path(directory)
    rank = int(os.environ["RANK"])
    fabric = two()
    seen = runs(fabric, folder / "half at 2.ckpt")
    parts = two(AutoTPFabricStrategy(save_distributed_checkpoint=True))
    strategy: Any = parts.strategy
    of_parts = run(
        parts, steps=HALF, save=folder / "half in parts", save_after=HALF,
        at_end=lambda: (strategy.report("8xH100"), strategy._measure.passes),
    )  # fmt: skip
    seen["report"], seen["passes"] = of_parts["at end"]
    for name in ("half at 1.ckpt", "half at 2.ckpt", "half in parts"):
        seen[name] = run(fabric, load=folder / name, skip=HALF)
    seen["own"] = own_loss(fabric)
    seen["copied"] = own_loss(fabric, is_copied=True)
    seen["with state"] = run(fabric, **STATEFUL)
    seen["whole matrices"] = whole_matrices(fabric, folder / "whole matrices of 2.ckpt")
    seen["order"] = order_of(fabric)
    seen["workers"] = list(fabric.setup_dataloaders(augmenting()))
    seen["read once"] = order_of(two(AutoTPFabricStrategy(broadcast_batches=True)))
    seen["reduced"] = [fabric.all_reduce(torch.tensor(2.0), reduce_op=how).item() for how in ("sum", "mean")]
    seen["decisions"] = [fabric.strategy.reduce_boolean_decision(rank == 0, all=every) for every in (True, False)]
    for precision in ("bf16-mixed", "bf16-true"):
        seen[precision] = own_loss(two(precision=precision))["losses"]
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
    seen["16-mixed"] = own_loss(two(plugins=[scaled]))["losses"]
    seen["module"] = lightning_module(fabric)
    seen.update(loading(fabric, folder))
    seen.update(mistakes(fabric, folder, rank))
    return seen


def augmenting() -> DataLoader[Any]:
    return DataLoader(blocks(), batch_size=10, num_workers=2, collate_fn=augmented)  # type: ignore[arg-type]


def loading(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """What else is loaded and saved."""
    seen: dict[str, Any] = {}
    model = fabric.setup_module(Plain())
    seen["alike"] = isinstance(model.module, Plain), model.autotp.plan.ranks, model.head.out_features
    fabric.save(folder / "filtered.ckpt", {"model": model}, filter={"model": lambda name, value: "head" in name})
    with torch.no_grad():
        plain = Plain()
        if fabric.is_global_zero:
            torch.save(plain.state_dict(), folder / "raw.pt")
        seen["plain"] = plain.state_dict()
    fabric.barrier()
    fabric.load_raw(folder / "raw.pt", model)
    seen["raw"] = whole(model)
    fabric.load(folder / "filtered.ckpt", {"model": model, "nothing": None}, strict=False)
    seen["everything"] = fabric.load(folder / "half in parts")
    save_pretrained(fabric.setup_module(AutoModelForCausalLM.from_config(tiny_config())).module, folder / "exported")
    return seen


def mistakes(fabric: Fabric, folder: Path, rank: int) -> dict[str, Any]:
    """Errors, each on both ranks."""
    seen: dict[str, Any] = {}
    inputs = torch.zeros(3, 7, dtype=torch.long)
    given = two(AutoTPFabricStrategy(example_inputs=lambda: (inputs,)))
    small = given.setup_module(Plain())
    optimizer = given.setup_optimizers(torch.optim.Adam(small.parameters()))
    given.backward(small(IDS[:4]).float().sum())
    optimizer.step()

    class Other(Plain):
        def forward(self, pictures: Tensor) -> Tensor:
            return super().forward(pictures)

    def set_up(kind: Any, **options: Any) -> Any:
        model = Plain()
        return given.setup(model, kind(model.parameters(), **options))

    def in_the_place_of_garbage() -> None:
        gone = given.setup_optimizers(torch.optim.SGD(small.parameters()))
        is_there = ref(gone.optimizer)
        if rank > 0:
            del gone
            gc.collect()
            assert is_there() is None
        given.setup_optimizers(torch.optim.LBFGS(small.parameters()))

    def set_up_before() -> None:
        model = Plain()
        early = given.setup_optimizers(torch.optim.Adam(model.parameters()))
        given.setup_module(model)
        early.step()

    def set_up_afterwards() -> None:
        model = Plain()
        late = torch.optim.Adam(model.parameters())
        given.setup_module(model)
        given.setup_optimizers(late)

    def on_meta() -> None:
        with given.init_module():
            model = Plain()
        given.setup(model, torch.optim.Adagrad(model.parameters()))

    def written_outside() -> None:
        with given.init_module():
            model = Plain()
        nn.init.ones_(model.head.weight)
        given.setup(model)

    chosen = two(AutoTPFabricStrategy(example_inputs=lambda: (inputs,), models=["student"]))
    pair = chosen.setup_module(nn.ModuleDict({"student": Plain(), "teacher": Plain()}))
    seen["chosen"] = [is_parallel(model) for model in pair.module.values()]
    seen["no such model"] = error_of(chosen.setup_module, nn.ModuleDict({"teacher": Plain()}))
    seen["no inputs"] = error_of(fabric.setup_module, Other())
    seen["twice"] = error_of(given.setup_module, small.module)
    seen["foreign"] = error_of(given.setup, Plain(), torch.optim.Adam([nn.Parameter(torch.ones(2))]))
    seen["quadratic"] = error_of(set_up, torch.optim.LBFGS)
    seen["in the place of garbage"] = error_of(in_the_place_of_garbage)
    for name, model in (("of a copy", small), ("of a copy of the module", small.module)):
        seen[name] = error_of(given.setup_optimizers, torch.optim.LBFGS(copy.deepcopy(model).parameters()))
    seen["before"] = error_of(set_up_before)
    seen["afterwards"] = error_of(set_up_afterwards)
    seen["state on meta"] = error_of(on_meta)
    seen["written outside"] = error_of(written_outside)
    seen["whole state"] = error_of(optimizer.load_state_dict, optimizer.state_dict())
    seen["missing key"] = error_of(given.load, folder / "filtered.ckpt", {"model": small, "step": 0})
    seen["missing weight"] = error_of(given.load, folder / "filtered.ckpt", {"model": small})
    seen["no file"] = error_of(given.load, folder / "nothing.ckpt", {"model": small})
    seen["url"] = error_of(given.save, "s3://bucket/file", {"model": small})
    sampler = DistributedSampler(range(8), num_replicas=2, rank=rank)  # type: ignore[arg-type]
    seen["sampler"] = error_of(given.setup_dataloaders, DataLoader(range(8), sampler=sampler))  # type: ignore[arg-type]
    different = given.setup_dataloaders(DataLoader((IDS + rank) % 67, batch_size=4))  # type: ignore[arg-type]
    seen["different batches"] = error_of(small, next(iter(different)))
    longer = given.setup_dataloaders(DataLoader(IDS[:, : 8 + rank], batch_size=4))  # type: ignore[arg-type]
    seen["different shapes"] = error_of(small, next(iter(longer)))
    torch.manual_seed(rank)
    seen["different random numbers"] = error_of(small, IDS)
    return seen
