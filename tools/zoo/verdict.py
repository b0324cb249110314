"""What the zoo says about one architecture, and the part of it that follows from a plan alone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from lightning_autotp.layouts.places import Boundary, CallPoint
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.transitions import TRANSITIONS
from lightning_autotp.layouts.types import Shard
from lightning_autotp.operators import count_flops
from lightning_autotp.operators.graph import OPAQUE
from lightning_autotp.solving.implementations import DEFERRED_SUM
from lightning_autotp.solving.solution import Solution

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
# A path with a number in it lies in one of a stack of layers.
_NUMBER = re.compile(r"(^|(?<=\.))(\d+)(?=\.|$)")
_IN_A_LAYER = re.compile(r"(^|\.)\d+(\.|$)")
_FIRST_LAYER = re.compile(r"^\D*\b0$")


@dataclass
class Left:
    """Parameters that stay whole for one reason.

    Attributes:
        share: their share of the model's parameter elements.
        example: one of them.
        reason: the operator and source line, or what else kept them whole.
    """

    share: float
    example: str
    reason: str


@dataclass
class Verdict:
    """What was found about one architecture.

    Attributes:
        name: its ``model_type``.
        group: the mapping it was taken from.
        ranks: number of tensor-parallel ranks.
        outcome: ``"parity"``, ``"wrong"``, ``"error"``, ``"planned"`` (not run) or ``"left out"``.
        reason: of an error, of a wrong result, or why it was left out.
        parameters: number of parameter elements.
        sharded: share of them that is sharded.
        unused: share of them that the batch does not train (another modality's tower).
        flops: share of the matrix-product FLOPs in the layers whose operands are sharded.
        counted: share of the FLOPs of a whole forward and backward that the ranks divide, as torch counts them.
        all_reduces: all-reduces per layer in forward.
        least: the fewest known for such a layer; 0 where none is (convolutional stages, sequence parallelism).
        other_collectives: gathers and scatters per layer in forward.
        precision: bits of the numbers that were compared: 32, or 64 where 32 could not tell.
        compared: gradients that are so large that a difference out of tolerance is none of rounding.
        loss_error: the largest relative difference of a loss: of the step, of a second one, and in eval mode.
        gradient_error: largest difference of a gradient, relative to the largest element of its tensor.
        worst: the parameter with that gradient.
        buffer_error: largest difference of a buffer, relative to its largest element.
        no_eval: why calls in eval mode are refused, where they are.
        left: what stays whole, largest share first.
        seconds: planning time.
    """

    name: str
    group: str
    ranks: int
    outcome: str = "error"
    reason: str = ""
    parameters: int = 0
    sharded: float = 0.0
    unused: float = 0.0
    flops: float = 0.0
    counted: float = 0.0
    all_reduces: float = 0.0
    least: float = 0.0
    other_collectives: float = 0.0
    precision: int = 32
    compared: int = 0
    loss_error: float = 0.0
    gradient_error: float = 0.0
    worst: str = ""
    buffer_error: float = 0.0
    no_eval: str = ""
    left: list[Left] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_parity(self) -> bool:
        """Whether loss and every gradient equal one process's."""
        return self.outcome == "parity"

    @property
    def has_fewest_collectives(self) -> bool:
        """Whether the layers' forward holds the fewest all-reduces known, and no gathers or scatters beside them."""
        return bool(self.parameters and self.least) and self.all_reduces <= self.least and not self.other_collectives


def describe_plan(verdict: Verdict, plan: Plan, solution: Solution, layers: int | None = None) -> None:
    """Fill in what a plan and its solution tell; without ``layers``, every numbered module with a product is one."""
    verdict.parameters = sum(math.prod(parameter.shape) for parameter in plan.parameters)
    verdict.sharded = plan.sharded_fraction
    verdict.flops = sharded_flops(solution)
    reduced, others = forward_collectives(solution)
    number = layers or len(_numbered(solution)) or 1
    verdict.all_reduces, verdict.other_collectives = reduced / number, others / number
    verdict.left = left_whole(plan)


def left_whole(plan: Plan) -> list[Left]:
    """What stays whole and why, largest share first."""
    total = sum(math.prod(parameter.shape) for parameter in plan.parameters)
    sizes: dict[str, int] = {}
    examples: dict[str, str] = {}
    for parameter in plan.parameters:
        if parameter.reason:
            sizes[parameter.reason] = sizes.get(parameter.reason, 0) + math.prod(parameter.shape)
            examples.setdefault(parameter.reason, parameter.names[0])
    ranked = sorted(sizes, key=lambda reason: (-sizes[reason], reason))
    return [Left(sizes[reason] / max(total, 1), examples[reason], reason) for reason in ranked]


def sharded_flops(solution: Solution) -> float:
    """Share of the matrix-product FLOPs in the layers that the ranks divide among them.

    Where the model has no numbered layers, all its products count. A module that the plan does not look into counts as
    one product of each of its matrices with every position of its result, done whole.
    """
    tensors, parameters = solution.graph.tensors, solution.graph.parameters
    done: dict[bool, list[float]] = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for operator in solution.graph.operators:
        if not operator.outputs:
            continue
        if operator.name == OPAQUE:
            matrices = [tensors[tensor].shape for tensor in operator.inputs if tensor in parameters]
            elements = sum(math.prod(shape) for shape in matrices if len(shape) > 1)
            done[True][0] += 2.0 * elements * math.prod(tensors[operator.outputs[0]].shape[:-1])
        flops = count_flops(operator, lambda tensor: tensors[tensor].shape)
        if flops:
            touched = (*operator.inputs, *operator.outputs)
            divided = any(isinstance(solution.layouts.get(tensor), Shard) for tensor in touched)
            count = done[_IN_A_LAYER.search(operator.module) is not None]
            count[0] += flops
            count[1] += flops * divided
    total, sharded = done[True] if done[True][0] else done[False]
    return sharded / total if total else 0.0


def _numbered(solution: Solution) -> set[str]:
    """Paths up to their last number, of the modules that hold a matrix product or convolution."""
    paths = (o.module for o in solution.graph.operators if o.layer in ("Linear", "Embedding") or "conv" in o.name)
    return {path[: found[-1].end(2)] for path in paths if (found := list(_NUMBER.finditer(path)))}


def forward_collectives(solution: Solution) -> tuple[int, int]:
    """All-reduces, and other collectives, that the layers' forward holds.

    What enters a stack of layers from outside is the embedding's, also where its layout changes only at the first
    layer's boundary.
    """
    kinds: list[str] = []
    entering = _entering(solution)
    for change in solution.conversions:
        if _IN_A_LAYER.search(change.boundary.module) and change.boundary not in entering:
            kinds.append(TRANSITIONS[change.pair].forward)
    for number, use in solution.uses.items():
        if use.output not in (None, DEFERRED_SUM) and _IN_A_LAYER.search(solution.graph.operators[number].module):
            kinds.append(TRANSITIONS[use.output].forward)
    reduced = sum(kind == "all_reduce" for kind in kinds)
    return reduced, sum(map(bool, kinds)) - reduced


def _entering(solution: Solution) -> set[Boundary | CallPoint]:
    """Boundaries of first layers at which something comes in that no layer has made."""
    producers = solution.graph.producers()
    found: set[Boundary | CallPoint] = set()
    for operator in solution.graph.operators:
        if isinstance(operator.boundary, Boundary) and _FIRST_LAYER.search(operator.module):
            source = producers.get(operator.inputs[0])
            while source is not None and source.boundary is not None and not _IN_A_LAYER.search(source.module):
                source = producers.get(source.inputs[0])
            if source is None or not _IN_A_LAYER.search(source.module):
                found.add(operator.boundary)
    return found
