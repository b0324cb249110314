"""One architecture on one rank: the local model's loss and gradients against the untouched model's."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.pipeline import make_plan, parallelize
from lightning_autotp.solving.cost import Profile
from zoo.configs import LEAST_ALL_REDUCES, why_left_out
from zoo.counting import counted, divided
from zoo.inputs import training_batch
from zoo.models import build, layer_count, stir
from zoo.packages import PACKAGES, entries
from zoo.packages.entry import of_output, towards_noise
from zoo.verdict import GRADIENT_TOLERANCE, LOSS_TOLERANCE, Verdict, describe_plan
from zoo.without_text import WITHOUT_TEXT

# A gradient that is zero in exact arithmetic (a key bias under a softmax) consists of rounding alone: differences below
# this share of the model's largest gradient are rounding.
_ROUNDING = {torch.float32: 1e-7, torch.float64: 1e-14}
_FINER = 1e-4
"""Tolerances in fp64, relative to those in fp32."""


PROFILE = Profile(flops=Profile().flops * 64 / 4096)
"""What a plan is priced for: a product of a model 64 wide takes the time, beside what is sent, of one 4,096 wide."""
_EXAMPLE = 1
"""Seed of the batch that is planned with: another one than is trained on, for a plan must hold for every batch."""


def prepare(name: str, group: str, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """The architecture's tiny model, the same on every call, and a batch."""
    torch.manual_seed(0)
    model = entries(group)[name].build() if group in PACKAGES else build(name, group)
    stir(model)
    model.train()
    return model, make_batch(name, group, model, seed)


def make_batch(name: str, group: str, model: Any, seed: int) -> dict[str, Any]:
    """One batch for a model that :func:`prepare` made."""
    if group in PACKAGES:
        return entries(group)[name].inputs(torch.Generator().manual_seed(seed))
    return training_batch(name, group, model.config, seed)


def _layers(group: str, model: Any) -> int | None:
    """How many layers a language model has, encoder and decoder together; of other models the graph tells."""
    if group in WITHOUT_TEXT or group in PACKAGES:
        return None
    has_tower = any(getattr(model.config, part, None) is not None for part in ("vision_config", "audio_config"))
    return None if has_tower else layer_count(model.config)


def plan_one(name: str, group: str, ranks: int, sequence_parallel: bool = False) -> Verdict:
    """Plan one architecture in this process, without running it."""
    least = {"causal": LEAST_ALL_REDUCES.get(name, 2.0), "masked": 2.0, "seq2seq": 2.5}.get(group, 0.0)
    verdict = Verdict(name, group, ranks, least=0.0 if sequence_parallel else least)
    if reason := why_left_out(group, name):
        verdict.outcome, verdict.reason = "left out", reason
        return verdict
    try:
        model, batch = prepare(name, group, _EXAMPLE)
        started = time.perf_counter()
        plan, solution = make_plan(
            model,
            ranks,
            example_inputs=batch,
            profile=PROFILE,
            sequence_parallel=sequence_parallel,
        )
        verdict.seconds = time.perf_counter() - started
        describe_plan(verdict, plan, solution, _layers(group, model))
        verdict.outcome = "planned"
    except Exception as error:  # whatever goes wrong with one architecture is its verdict
        verdict.reason = f"{type(error).__name__}: {error}"
    return verdict


def run_one(
    name: str, group: str, process_group: dist.ProcessGroup, seed: int = 0, sequence_parallel: bool = False
) -> dict[str, Any]:
    """Compare this rank's loss and gradients with one process's. Collective over ``process_group``.

    In fp32; where any rank finds differences there, or nothing above rounding to compare, in fp64 to tolerances ten
    thousand times tighter. Rounding goes away with it and a mistake does not: batch normalization over three small
    pictures, say, multiplies fp32's rounding by thousands.

    Returns:
        ``precision`` (32 or 64), ``loss_error``, ``gradient_error``, ``worst`` (a parameter's name), ``wrong`` (what is
        out of tolerance, or nothing), ``compared`` (how many gradients are so large that a difference out of tolerance
        is none of rounding), ``unused`` (share of the parameters that the batch does not train) and ``counted`` (share
        of the FLOPs of forward and backward that the ranks divide among them).
    """
    coarse = _compare(name, group, process_group, seed, torch.float32, sequence_parallel)
    unclear = torch.tensor(float(bool(coarse.wrong()) or not coarse.compared))
    dist.all_reduce(unclear, dist.ReduceOp.MAX, group=process_group)
    if not unclear.item():
        return coarse.findings()
    fine = _compare(name, group, process_group, seed, torch.float64, sequence_parallel)
    return fine.findings(coarse)


@dataclass(frozen=True)
class _Comparison:
    """What one precision shows on this rank: a step of the local model beside one of the untouched model."""

    precision: torch.dtype
    loss: float
    wanted_loss: float
    errors: dict[str, float]
    """Each parameter's largest difference of a gradient, relative to the gradient's largest element."""
    compared: int
    unused: float
    counted: float

    @property
    def loss_error(self) -> float:
        return abs(self.loss - self.wanted_loss) / max(abs(self.wanted_loss), 1e-12)

    def wrong(self, coarse: _Comparison | None = None) -> str:
        """What is out of tolerance, or nothing.

        Args:
            coarse: the comparison in fp32, where this one is in fp64. A model may compute some things in fp32 whatever
                its weights are; there fp64 is no finer, and fp32's tolerances hold for both.
        """

        def agrees(error: float, in_coarse: float, tolerance: float) -> bool:
            if coarse is None:
                return error <= tolerance
            return error <= tolerance * _FINER or (error <= tolerance and in_coarse <= tolerance)

        before = self if coarse is None else coarse
        if not agrees(self.loss_error, before.loss_error, LOSS_TOLERANCE):
            return f"the loss is {self.loss:.12g} instead of {self.wanted_loss:.12g}"
        bad = {n: e for n, e in self.errors.items() if not agrees(e, before.errors[n], GRADIENT_TOLERANCE)}
        if not bad:
            return ""
        worst = max(bad, key=lambda n: bad[n])
        differ = f"{len(bad)} of {len(self.errors)} gradients differ"
        return f"{differ}, {worst}'s by {bad[worst]:.1e} of its largest element"

    def findings(self, coarse: _Comparison | None = None) -> dict[str, Any]:
        """What :func:`run_one` returns."""
        worst = max(self.errors, key=lambda n: self.errors[n])
        return {
            "precision": 32 if self.precision == torch.float32 else 64,
            "loss_error": self.loss_error,
            "gradient_error": self.errors[worst],
            "worst": worst,
            "wrong": self.wrong(coarse),
            "compared": self.compared,
            "unused": self.unused,
            "counted": self.counted,
        }


def _compare(
    name: str,
    group: str,
    process_group: dist.ProcessGroup,
    seed: int,
    precision: torch.dtype,
    sequence_parallel: bool,
) -> _Comparison:
    """The comparison in one precision. Collective over ``process_group``."""
    model, batch = prepare(name, group)
    nn.Module.to(model, precision)
    example = _converted(make_batch(name, group, model, _EXAMPLE), precision)
    batch = _converted(batch, precision)
    loss = _loss(name, group)
    local = copy.deepcopy(model)
    torch.manual_seed(seed)
    wanted, flops = _step(model, batch, loss)
    parallelize(
        local,
        process_group,
        example_inputs=example,
        profile=PROFILE,
        sequence_parallel=sequence_parallel,
    )
    torch.manual_seed(seed)
    found, mine = _step(local, batch, loss)
    everywhere = torch.tensor(mine)
    dist.all_reduce(everywhere, group=process_group)
    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    largest = max((float(g.abs().max()) for g in gradients.values() if g is not None), default=0.0)
    rounding = largest * _ROUNDING[precision]
    visible = rounding / GRADIENT_TOLERANCE
    metas = parallel_state(local).metas
    errors = {n: _gradient_error(p, metas[n], gradients, rounding) for n, p in local.named_parameters()}
    total = sum(p.numel() for p in model.parameters())
    unused = sum(p.numel() for p in model.parameters() if p.grad is None or not p.grad.any())
    return _Comparison(
        precision,
        loss=found.item(),
        wanted_loss=wanted.item(),
        errors=errors,
        compared=sum(g is not None and float(g.abs().max()) > visible for g in gradients.values()),
        unused=unused / total,
        counted=divided(flops, int(everywhere), process_group.size()),
    )


def _loss(name: str, group: str) -> Callable[[Any, dict[str, Any]], Tensor]:
    """What a model's output trains on."""
    if group in PACKAGES:
        return entries(group)[name].loss
    return towards_noise if group == "text" else of_output


def _step(model: nn.Module, batch: dict[str, Any], loss: Callable[[Any, dict[str, Any]], Tensor]) -> tuple[Tensor, int]:
    """The loss, and the FLOPs of the forward and the backward."""
    losses: list[Tensor] = []

    def run() -> None:
        losses.append(loss(model(**batch), batch))
        losses[0].backward()

    flops = counted(run)
    return losses[0], flops


def _converted(batch: dict[str, Any], precision: torch.dtype) -> dict[str, Any]:
    """The batch with its floating-point tensors in the precision."""

    def one(value: Any) -> Any:
        return value.to(precision) if isinstance(value, Tensor) and value.is_floating_point() else value

    return {key: tuple(map(one, value)) if isinstance(value, tuple) else one(value) for key, value in batch.items()}


def _gradient_error(
    parameter: nn.Parameter, meta: ParameterMeta, wanted: dict[str, Tensor | None], rounding: float
) -> float:
    """The largest difference in this rank's part, relative to the whole gradient's largest element."""
    whole = wanted[meta.name]
    local = torch.zeros_like(parameter) if parameter.grad is None else plain(parameter.grad)
    if whole is None:
        return float(bool(local.any()))
    difference = 0.0
    for block in meta.mapping:
        here = local[tuple(slice(*run) for run in block.local)]
        there = whole[tuple(slice(*run) for run in block.original)]
        if here.numel():
            gap = float((here - there).abs().max())
            if not math.isfinite(gap):
                return math.inf
            difference = max(difference, gap)
    return 0.0 if difference <= rounding else difference / max(float(whole.abs().max()), 1e-30)
