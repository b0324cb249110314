"""One architecture on one rank: the local model's losses, gradients and buffers against the untouched model's."""

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
from transformers import PreTrainedModel

from lightning_autotp.parameters.local_blocks import plain
from lightning_autotp.parameters.meta import ParameterMeta
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.pipeline import make_plan, parallelize
from lightning_autotp.proving.new_calls import UnprovedCall
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
_STEP = 0.01
"""Length of the optimizer's step that is made, relative to the parameters: it changes what the model computes."""
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
    name: str,
    group: str,
    process_group: dist.ProcessGroup,
    seed: int = 0,
    sequence_parallel: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Compare this rank's losses, gradients and buffers with one process's. Collective over ``process_group``.

    A step of gradient descent is made; then come the loss of a second step, and the one in eval mode.

    In fp32; where any rank finds differences there, or nothing above rounding to compare, in fp64 to tolerances ten
    thousand times tighter. Rounding goes away with it and a mistake does not: batch normalization over three small
    pictures, say, multiplies fp32's rounding by thousands.

    Returns:
        ``precision`` (32 or 64), ``loss_error`` (the largest of the three losses'), ``gradient_error``, ``worst`` (a
        parameter's name), ``buffer_error``, ``no_eval`` (why calls in eval mode are refused, if they are), ``wrong``
        (what is out of tolerance, or nothing), ``compared`` (how many gradients are so large that a difference out of
        tolerance is none of rounding), ``unused`` (share of the parameters that the batch does not train) and
        ``counted`` (share of the FLOPs of forward and backward that the ranks divide among them).
    """
    coarse = _compare(name, group, process_group, seed, torch.float32, sequence_parallel, device)
    unclear = torch.tensor(float(bool(coarse.wrong()) or not coarse.compared))
    dist.all_reduce(unclear, dist.ReduceOp.MAX, group=process_group)
    if not unclear.item():
        return coarse.findings()
    fine = _compare(name, group, process_group, seed, torch.float64, sequence_parallel, device)
    return fine.findings(coarse)


@dataclass(frozen=True)
class _Comparison:
    """What one precision shows on this rank: a step of the local model beside one of the untouched model."""

    precision: torch.dtype
    losses: dict[str, tuple[float, float]]
    """The local model's and the untouched model's."""
    errors: dict[str, float]
    """Each parameter's largest difference of a gradient, relative to the gradient's largest element."""
    buffers: dict[str, float]
    """Each buffer's largest difference after all steps, relative to its largest element."""
    no_eval: str
    compared: int
    unused: float
    counted: float

    @property
    def loss_errors(self) -> dict[str, float]:
        return {key: abs(found - wanted) / max(abs(wanted), 1e-12) for key, (found, wanted) in self.losses.items()}

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
        for key, error in self.loss_errors.items():
            if not agrees(error, before.loss_errors[key], LOSS_TOLERANCE):
                found, wanted = self.losses[key]
                return f"the {key} is {found:.12g} instead of {wanted:.12g}"
        for key, error in self.buffers.items():
            if not agrees(error, before.buffers[key], GRADIENT_TOLERANCE):
                return f"the buffer {key} differs by {error:.1e} of its largest element"
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
            "loss_error": max(self.loss_errors.values()),
            "buffer_error": max(self.buffers.values(), default=0.0),
            "no_eval": self.no_eval,
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
    device: str,
) -> _Comparison:
    """The comparison in one precision. Collective over ``process_group``."""
    model, batch = prepare(name, group)
    nn.Module.to(model, device=device, dtype=precision)
    if precision == torch.float64 and isinstance(model, PreTrainedModel) and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch's grouped products have none of that precision
    example = _converted(make_batch(name, group, model, _EXAMPLE), precision, device)
    batch = _converted(batch, precision, device)
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
    rate = _rate(model)
    seconds = [_second_loss(one, batch, loss, rate) for one in (local, model)]
    losses = {"loss": (found.item(), wanted.item()), "loss of a second step": (seconds[0], seconds[1])}
    no_eval = ""
    if (expected := _loss_in_eval(model, batch, loss)) is not None:
        try:
            losses["loss in eval mode"] = _loss_in_eval(local, batch, loss) or 0.0, expected
        except UnprovedCall as error:
            no_eval = str(error)
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
        losses=losses,
        errors=errors,
        buffers={
            n: _difference(here, there) for (n, here), there in zip(local.named_buffers(), model.buffers(), strict=True)
        },
        no_eval=no_eval,
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


def _rate(model: nn.Module) -> float:
    """A learning rate with which a step of gradient descent moves all parameters together by :data:`_STEP`."""
    moved = [parameter for parameter in model.parameters() if parameter.grad is not None]
    sizes = [torch.stack([tensor.detach().double().norm() for tensor in tensors]).norm() for tensors in (
        moved, [parameter.grad for parameter in moved if parameter.grad is not None],
    )]  # fmt: skip
    return _STEP * float(sizes[0] / sizes[1].clamp(min=1e-30))


def _second_loss(
    model: nn.Module, batch: dict[str, Any], loss: Callable[[Any, dict[str, Any]], Tensor], rate: float
) -> float:
    """The loss after a step of gradient descent with the gradients that are there."""
    torch.optim.SGD(model.parameters(), rate).step()
    torch.manual_seed(_EXAMPLE)
    return loss(model(**batch), batch).item()


def _loss_in_eval(
    model: nn.Module, batch: dict[str, Any], loss: Callable[[Any, dict[str, Any]], Tensor]
) -> float | None:
    """The loss in eval mode; ``None`` where the model gives something there that has none."""
    torch.manual_seed(_EXAMPLE)
    model.eval()
    with torch.no_grad():
        output = model(**batch)
    try:
        return loss(output, batch).item()
    except (AttributeError, TypeError, KeyError, IndexError):
        return None


def _difference(here: Tensor, there: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest element of the second."""
    if not here.numel():
        return 0.0
    here, there = here.double(), there.double()
    gap = torch.where(here == there, 0.0, (here - there).abs()).max()  # infinite elements are equal, too
    return float(gap / there[there.isfinite()].abs().max().clamp(min=1e-30)) if float(gap) else 0.0


def _converted(batch: dict[str, Any], precision: torch.dtype, device: str) -> dict[str, Any]:
    """The batch on the device, with its floating-point tensors in the precision."""

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, precision if value.is_floating_point() else value.dtype)

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
