"""Whether a rule tells the truth: an operator on the ranks' parts, forward and backward, against the operator itself.

A :class:`Tape` runs real ATen operators on real tensors and notes them as a graph, as a capture would. The solver then
says which combinations of types each operator may run at, and :meth:`Tape.prove` plays every one of them: it gives each
rank its part of the inputs, runs the operator per rank with its sizes localized, and compares.

======= ======================================= ====================================================================
type    values of the ranks                     gradients of the ranks
======= ======================================= ====================================================================
I       each is the whole                       each is the whole
R       each is the whole                       add up to the whole
S       each is its slice of the whole          an element's owners' gradients add up to the whole's element
P       add up to the whole                     each is the whole
======= ======================================= ====================================================================
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_autotp.capture.schemas import named_arguments
from lightning_autotp.layouts.blocks import blocks_of
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.places import CallSite
from lightning_autotp.layouts.types import Invariant, Layout, Partial, Replicate, Shard
from lightning_autotp.operators import Relation, record, relate
from lightning_autotp.operators.graph import Graph, Operator, Ref, TensorInfo, TorchCall
from lightning_autotp.parallel.embedding import vocab_parallel_lookup
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.parallel.mean import addend
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.tables import Tables

TOLERANCE = 1e-10
INVARIANT, REPLICATE, PARTIAL = Invariant(), Replicate(), Partial()
# A type fixes its gradient's: what is the same on every rank but used differently adds up, and the other way round.
_GRADIENT = {Replicate: PARTIAL, Partial: REPLICATE}


class Untrue(AssertionError):
    """The ranks do not compute what the whole operator does."""


@dataclass(frozen=True)
class Combination:
    """Types that an operator's tensors may have together."""

    relation: Relation
    layouts: Mapping[int, Layout]

    @property
    def kind(self) -> str:
        """``"sharded"``, ``"contracted"`` (sharded in, Partial out), ``"linear"`` or ``"whole"``."""
        inputs = {type(self.layouts[tensor]) for tensor in self.relation.inputs if tensor in self.layouts}
        outputs = {type(self.layouts[tensor]) for tensor in self.relation.outputs}
        if Shard not in inputs | outputs:
            return "linear" if Partial in inputs else "whole"
        return "contracted" if self.is_contracted else "sharded"

    @property
    def is_contracted(self) -> bool:
        """Whether the operator's results are to be added up."""
        sharded = any(isinstance(self.layouts.get(tensor), Shard) for tensor in self.relation.inputs)
        summed = (Partial, Invariant, Replicate) if self.relation.needs_implementation else (Partial, Invariant)
        return sharded and any(isinstance(self.layouts[t], summed) for t in self.relation.outputs)


class Tape:
    """Real operators on real tensors, noted as a graph.

    Args:
        seed: of every value that is drawn.
        coarse: draw multiples of 1/8, so that sums are exact in any floating-point type.
    """

    def __init__(self, seed: int = 0, coarse: bool = False) -> None:
        self.graph = Graph()
        self.values: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(seed)
        self.coarse = coarse
        self._numbers: dict[int, int] = {}
        self._calls: dict[int, dict[str, Any]] = {}

    def draw(self, *shape: int, dtype: torch.dtype = torch.float64, positive: bool = False) -> Tensor:
        """Random values between -2 and 2 (or 0.2 and 2)."""
        if self.coarse:
            return torch.randint(-16, 17, shape, generator=self.generator).to(dtype) / 8
        value = torch.rand(shape, generator=self.generator, dtype=torch.float64) * 4 - 2
        return (value.abs() * 0.9 + 0.2 if positive else value).to(dtype)

    def parameter(self, *shape: int, dtype: torch.dtype = torch.float64, positive: bool = False) -> Tensor:
        """A parameter of the graph."""
        value = self._note(self.draw(*shape, dtype=dtype, positive=positive), static=False)
        number = self._numbers[id(value)]
        self.graph.parameters[number] = f"p{number}"
        return value

    def constant(self, value: Tensor) -> Tensor:
        """A tensor that depends on no parameter."""
        return self._note(value, static=True)

    def number(self, tensor: Tensor) -> int:
        """Its index in the graph."""
        return self._numbers[id(tensor)]

    def call(self, name: str, *args: Any, layer: str = "", **kwargs: Any) -> Any:
        """Run an operator and note it; its (first) result, or all of them as a list."""
        function = overload(name)
        numbered, keywords = pytree.tree_map_only(Tensor, lambda t: Ref(self.number(t)), (args, kwargs))
        draft = Operator(name, named_arguments(function, numbered, keywords), (), "", name, layer)
        static = all(self.graph.tensors[tensor].is_static for tensor in draft.inputs)
        result = FOR_GPUS.get(name, function)(*args, **kwargs)
        results = [result] if isinstance(result, Tensor) else list(result)
        results = [self._note(value.detach().resolve_conj().contiguous(), static) for value in results]
        operator = Operator(
            name, draft.arguments, tuple(map(self.number, results)), "", name, layer, call=len(self.graph.calls)
        )
        # A call of its own, at which no argument can be changed.
        self.graph.calls.append(TorchCall("", CallSite("tape", len(self.graph.calls), name, 0), (), ()))
        self._calls[len(self.graph.operators)] = _arguments(function, numbered, keywords)
        self.graph.operators.append(operator)
        return results[0] if isinstance(result, Tensor) else results

    def last(self, name: str) -> Operator:
        """The last operator called so."""
        return [operator for operator in self.graph.operators if operator.name == name][-1]

    def arguments(self, operator: Operator) -> dict[str, Any]:
        """What it was called with."""
        noted = self._calls[self.graph.operators.index(operator)]
        return pytree.tree_map_only(Ref, lambda ref: self.values[ref.tensor], noted)

    def shape(self, tensor: int) -> tuple[int, ...]:
        """The shape of a tensor of the graph."""
        return self.graph.tensors[tensor].shape

    def _note(self, value: Tensor, static: bool) -> Tensor:
        self._numbers[id(value)] = len(self.values)
        self.values.append(value)
        kind = str(value.dtype).removeprefix("torch.")
        differentiable = not static and (value.is_floating_point() or value.is_complex())
        self.graph.tensors.append(TensorInfo(tuple(value.shape), kind, value.element_size(), static, differentiable))
        return value

    # -- proofs ------------------------------------------------------------------------------------------------------

    def combinations(self, name: str, ranks: int) -> Iterator[Combination]:
        """Every combination of types that the solver may choose for the operators called ``name``."""
        tables = Tables(self.graph, ranks, IMPLEMENTATIONS, Profile(), {})
        for relation in tables.relations:
            if relation.operator.name == name:
                for kinds, _ in tables.combinations(relation):
                    yield Combination(relation, {tensor: tables.layout(tensor, kind) for tensor, kind in kinds.items()})

    def prove(self, name: str, ranks: int) -> Counter[str]:
        """Play every such combination; how many there were of each kind.

        Raises:
            Untrue: if the ranks' values or gradients are not what their types say.
        """
        seen: Counter[str] = Counter()
        for combination in self.combinations(name, ranks):
            seen[combination.kind] += 1
            if combination.kind != "whole":  # every rank would do the same
                self.play(combination, ranks)
        return seen

    def play(self, combination: Combination, ranks: int) -> None:
        """Run one operator on every rank's part and compare values and gradients with the whole operator's."""
        operator, layouts = combination.relation.operator, dict(combination.layouts)
        arguments = self._calls[self.graph.operators.index(operator)]
        lookup: Ownership | None = None
        if operator.layer and combination.is_contracted:
            # The layer adds the ranks' results up, and its bias after that: what is proven is the part before.
            layouts |= dict.fromkeys(operator.outputs, PARTIAL)
            if operator.name == "aten.embedding.default":
                layout = layouts[arguments["weight"].tensor]
                lookup = layout.ownership(0) if isinstance(layout, Shard) else None
            else:
                arguments = arguments | {"bias": None}
        of_mean: Ownership | None = None
        if operator.name == "aten.mean.dim" and combination.is_contracted:
            # As for layers, the sum over the ranks is not run.
            ((_, of_mean),) = layouts[arguments["self"].tensor].dims
            layouts |= dict.fromkeys(operator.outputs, PARTIAL)
        whole = {tensor: self._leaf(tensor, self.values[tensor]) for tensor in dict.fromkeys(operator.inputs)}
        results = _run(operator.name, arguments, whole)
        cotangents = [self.draw(*result.shape).to(result.dtype) for result in results]
        gradients = _gradients(whole, results, cotangents)

        inputs = [self._parts(value.detach(), layouts.get(t, INVARIANT), ranks) for t, value in whole.items()]
        given = [self._spread(c, layouts[t], ranks) for t, c in zip(operator.outputs, cotangents, strict=True)]
        values: list[list[Tensor]] = [[] for _ in results]
        backward: list[list[Tensor]] = [[] for _ in whole]
        for rank in range(ranks):
            local = {tensor: self._leaf(tensor, parts[rank]) for tensor, parts in zip(whole, inputs, strict=True)}
            shapes = [
                _part(result.detach(), layouts[t], rank).shape
                for t, result in zip(operator.outputs, results, strict=True)
            ]
            try:
                if lookup is not None:
                    found = [_lookup(arguments, local, lookup, rank)]
                else:
                    found = _run(
                        operator.name, self._localized(operator, arguments, layouts, local, shapes, rank), local
                    )
                    if of_mean is not None:
                        part = local[arguments["self"].tensor]
                        found = [addend(found[0], part, of_mean.local_size(rank) / of_mean.size)]
            except (RuntimeError, IndexError, ValueError) as error:
                raise Untrue(f"rank {rank} cannot run {_text(combination)}: {error}") from error
            if len(found) != len(results):
                raise Untrue(f"{len(found)} results on rank {rank} must be {len(results)}: {_text(combination)}")
            for number, value in enumerate(found):
                if value.shape != shapes[number]:
                    raise Untrue(
                        f"{list(value.shape)} on rank {rank} must be {list(shapes[number])}: {_text(combination)}"
                    )
                values[number].append(value.detach())
            for number, gradient in enumerate(_gradients(local, found, [parts[rank] for parts in given])):
                backward[number].append(gradient)
        for tensor, result, parts in zip(operator.outputs, results, values, strict=True):
            if not _agree(parts, result.detach(), layouts[tensor], owners_add=False):
                raise Untrue(f"an output is wrong: {_text(combination)}")
        for tensor, gradient, parts in zip(whole, gradients, backward, strict=True):
            layout = layouts.get(tensor)
            if layout is not None and not _agree(parts, gradient, _GRADIENT.get(type(layout), layout), owners_add=True):
                raise Untrue(f"the gradient of input {tensor} is wrong: {_text(combination)}")

    def _leaf(self, tensor: int, value: Tensor) -> Tensor:
        differentiable = not self.graph.tensors[tensor].is_static and (value.is_floating_point() or value.is_complex())
        return value.detach().clone().requires_grad_(differentiable)

    def _parts(self, value: Tensor, layout: Layout, ranks: int) -> list[Tensor]:
        """Every rank's part of a value."""
        if not isinstance(layout, Partial):
            return [_part(value, layout, rank) for rank in range(ranks)]
        addends = [self.draw(*value.shape).to(value.dtype) for _ in range(ranks - 1)]
        return [*addends, value - sum(addends)]

    def _spread(self, cotangent: Tensor, layout: Layout, ranks: int) -> list[Tensor]:
        """Every rank's part of a gradient; where several ranks' gradients add up, each element is one rank's."""
        if isinstance(layout, Invariant | Partial):
            return [cotangent] * ranks
        held = torch.stack([_mask(cotangent.shape, layout, rank, ranks) for rank in range(ranks)])
        chosen = (held * torch.rand(held.shape, generator=self.generator)).argmax(0)
        parts = [torch.where(chosen == rank, cotangent, torch.zeros_like(cotangent)) for rank in range(ranks)]
        return [_part(part, layout, rank) for rank, part in enumerate(parts)]

    def _localized(
        self,
        operator: Operator,
        arguments: dict[str, Any],
        layouts: Mapping[int, Layout],
        local: Mapping[int, Tensor],
        shapes: list[torch.Size],
        rank: int,
    ) -> dict[str, Any]:
        """The arguments with local sizes and positions."""
        known = record(operator.name)
        changed: dict[str, Any] = {}
        for name in known.sizes if known else ():
            if arguments[name] is None:
                continue
            changed[name] = _local_size(name, arguments, local, shapes)
        for name, tensor_name, dim in known.shares if known else ():
            shape = local[arguments[tensor_name].tensor].shape
            changed[name] = _over(arguments[name] * shape[dim], self.values[arguments[tensor_name].tensor].shape[dim])
        for name, tensor_name, dim_name in known.positions(operator) if known else ():
            tensor = arguments[tensor_name].tensor
            layout, size = layouts.get(tensor, INVARIANT), self.values[tensor].shape[arguments[dim_name]]
            owned = (
                layout.ownership(arguments[dim_name] % self.values[tensor].ndim) if isinstance(layout, Shard) else None
            )
            if owned is not None and arguments[name] is not None:
                before = slice(arguments[name], None).indices(size)[0]
                changed[name] = sum(index < before for index in owned.indices(rank))
        return arguments | changed


def forced(tape: Tape, name: str, tensor: Tensor, dim: int, ranks: int) -> Combination:
    """The operator with one dim's axis sharded wherever it occurs, whether its rule allows that or not."""
    relations, axes = relate(tape.graph)
    (relation,) = [relation for relation in relations if relation.operator.name == name]
    axis = axes.resolve(relation.inputs[tape.number(tensor)][dim])
    layouts: dict[int, Layout] = {}
    for other, dims in (*relation.inputs.items(), *relation.outputs.items()):
        cut = [at for at, found in enumerate(dims) if axes.resolve(found) == axis]
        sharded = Ownership.even(axis.size, ranks)
        layouts[other] = Shard(tuple((at, sharded) for at in cut)) if cut else REPLICATE
    return Combination(relation, layouts)


def overload(name: str) -> torch._ops.OpOverload:
    """The operator of a full name."""
    namespace, packet, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), kind)


def _arguments(function: torch._ops.OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """By the schema's names, with its defaults."""
    schema = function._schema.arguments
    positional = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    return {argument.name: argument.default_value for argument in schema} | positional | kwargs


def _run(name: str, arguments: dict[str, Any], tensors: Mapping[int, Tensor]) -> list[Tensor]:
    return run(name, pytree.tree_map_only(Ref, lambda ref: tensors[ref.tensor], arguments))


def run(name: str, arguments: Mapping[str, Any]) -> list[Tensor]:
    """What the operator gives for arguments by its schema's names; what it updates among them stays as it is."""
    schema = overload(name)._schema.arguments
    known = record(name)
    updated = known.updates if known is not None else ()
    arguments = {
        key: value.clone() if key in updated and value is not None else value for key, value in arguments.items()
    }
    result = MEANT.get(name, overload(name))(
        *(arguments[argument.name] for argument in schema if not argument.kwarg_only),
        **{argument.name: arguments[argument.name] for argument in schema if argument.kwarg_only},
    )
    results = [result] if isinstance(result, Tensor) else list(result)
    return [value.resolve_conj() for value in results]


def _numbers(values: Tensor, dims: int = 0) -> Tensor:
    """Random numbers in [0, 1) that an element has wherever it lies: by its value, or the sum over all later dims."""
    if dims:
        values = values.sum(tuple(range(dims, values.ndim)), keepdim=True) if values.ndim > dims else values
    return (values.detach().double() * 1e4).remainder(1)


def _dropped(values: Tensor, p: float, train: bool | None = True, dims: int = 0) -> Tensor:
    return values * (_numbers(values, dims) >= p) / (1 - p) if p and train is not False else values


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention with a mask of every score's own."""
    if not dropout_p:
        attend = torch.ops.aten.scaled_dot_product_attention.default
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    repeats = query.shape[-3] // key.shape[-3]
    key, value = (part.repeat_interleave(repeats, -3) for part in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return _dropped((scores if attn_mask is None else scores + attn_mask).softmax(-1), dropout_p) @ value


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, *_: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    return _efficient(query, key, value, None, True, dropout_p, is_causal, scale=scale)


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """With the scores' sums, padded as kernels do, and where its random numbers begin."""
    out = _attention(query, key, value, attn_bias, dropout_p, is_causal, scale=scale, enable_gqa=False)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    sums = (scores if attn_bias is None else scores + attn_bias).logsumexp(-1)
    return out, torch.nn.functional.pad(sums, (0, 32 - sums.shape[-1])), torch.zeros(2, dtype=torch.int64)


# No CPU runs these.
FOR_GPUS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention.default": _flash,
    "aten._scaled_dot_product_efficient_attention.default": _efficient,
    "aten._scaled_dot_product_cudnn_attention.default": _efficient,
}

# What these leave in memory is not defined, or has no derivative, or is random: what a model means by them.
MEANT: dict[str, Callable[..., Any]] = {
    **FOR_GPUS,
    "aten.empty.memory_format": lambda size, **_: torch.zeros(size),
    "aten.empty_like.default": lambda self, **_: torch.zeros_like(self),
    "aten.new_empty.default": lambda self, size, **_: self.new_zeros(size),
    **{
        f"aten.{name}": lambda self, *_, **__: _numbers(self)
        for name in (
            "rand_like.default",
            "randn_like.default",
            "exponential.default",
            "uniform.default",
            "normal_functional.default",
            *("log_normal.default", "cauchy.default", "geometric.default", "poisson.default"),
            *("randint_like.default", "randint_like.low_dtype"),
        )
    },
    "aten.bernoulli.default": lambda self, **_: (_numbers(self) < self).to(self.dtype),
    "aten.bernoulli.p": lambda self, p, **_: (_numbers(self) < p).to(self.dtype),
    **{f"aten.{name}.default": _dropped for name in ("dropout", "alpha_dropout")},
    **{f"aten.feature_{name}.default": partial(_dropped, dims=2) for name in ("dropout", "alpha_dropout")},
    "aten.native_dropout.default": lambda input, p, train: (_dropped(input, p, train), _numbers(input) >= p),
    "aten.rrelu.default": lambda self, lower, upper, training, _: self.where(
        self > 0, self * (lower + (upper - lower) * _numbers(self) if training else (lower + upper) / 2)
    ),
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.copy.default": lambda self, src, _: self.clone().copy_(src),
}


def _lookup(arguments: dict[str, Any], local: Mapping[int, Tensor], ownership: Ownership, rank: int) -> Tensor:
    ids, weight, padding = (
        local[arguments["indices"].tensor],
        local[arguments["weight"].tensor],
        arguments["padding_idx"],
    )
    return vocab_parallel_lookup(ids, weight, ownership, rank, padding if padding >= 0 else None)


def _gradients(inputs: Mapping[int, Tensor], outputs: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """The inputs' gradients; zeros where none flows, for integers, and of what torch has no derivative of."""
    pairs = [(out, given) for out, given in zip(outputs, cotangents, strict=True) if out.requires_grad]
    wanted = [value for value in inputs.values() if value.requires_grad]
    found: dict[int, Tensor | None] = {}
    if pairs and wanted:
        outs, given = zip(*pairs, strict=True)
        try:
            results = torch.autograd.grad(outs, wanted, given, allow_unused=True)
        except RuntimeError as error:  # NotImplementedError is one
            if not re.search(r"derivative for .* is not implemented|^derivative for aten::", str(error)):
                raise
            results = (None,) * len(wanted)
        found = {id(value): gradient for value, gradient in zip(wanted, results, strict=True)}
    gradients = [found.get(id(value)) for value in inputs.values()]
    return [torch.zeros_like(v) if g is None else g for v, g in zip(inputs.values(), gradients, strict=True)]


def _part(value: Tensor, layout: Layout, rank: int) -> Tensor:
    """``rank``'s slice of a whole tensor."""
    for dim, owned in layout.dims if isinstance(layout, Shard) else ():
        value = value.index_select(dim, torch.tensor(owned.indices(rank), dtype=torch.long))
    return value


def _mask(shape: torch.Size, layout: Layout, rank: int, ranks: int) -> Tensor:
    """Which elements ``rank`` holds."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for _, there, _ in blocks_of(shape, layout, rank, ranks):
        mask[tuple(slice(*run) for run in there)] = True
    return mask


def _agree(parts: list[Tensor], whole: Tensor, layout: Layout, *, owners_add: bool) -> bool:
    """Whether the ranks' parts are what a type says of the whole tensor."""
    if isinstance(layout, Partial):
        return _close(sum(parts[1:], parts[0]), whole)
    if isinstance(layout, Shard) and owners_add:
        total = torch.zeros_like(whole)
        for rank, part in enumerate(parts):
            total[_mask(whole.shape, layout, rank, len(parts))] += part.flatten()
        return _close(total, whole)
    return all(_close(part, _part(whole, layout, rank)) for rank, part in enumerate(parts))


def _close(found: Tensor, whole: Tensor) -> bool:
    if found.shape != whole.shape or found.dtype != whole.dtype:
        return False
    if whole.is_complex():
        return _close(torch.view_as_real(found.resolve_conj()), torch.view_as_real(whole.resolve_conj()))
    if not whole.is_floating_point():
        return torch.equal(found, whole)
    return torch.allclose(found.double(), whole.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def _local_size(name: str, arguments: dict[str, Any], local: Mapping[int, Tensor], shapes: list[torch.Size]) -> Any:
    """An argument that spells sizes, for the given local shapes of the outputs."""
    if name == "repeats":
        shape = local[arguments["self"].tensor].shape
        if "dim" in arguments:  # repeat_interleave
            return _over(shapes[0][arguments["dim"]], shape[arguments["dim"]])
        padded = (1,) * (len(shapes[0]) - len(shape)) + tuple(shape)
        return [_over(size, here) for size, here in zip(shapes[0], padded, strict=True)]
    if name == "output_size":  # repeat_interleave
        return shapes[0][arguments["dim"]]
    if name == "sizes":  # unflatten
        dim = arguments["dim"] % local[arguments["self"].tensor].ndim
        return shapes[0][dim : dim + len(arguments["sizes"])]
    if name == "groups":  # a convolution
        is_transposed = arguments.get("transposed", "output_padding" in arguments)
        x, weight = (local[arguments[key].tensor].shape for key in ("input", "weight"))
        return _over((shapes[0] if is_transposed else x)[len(x) - len(weight) + 1], weight[1])
    if name == "length":  # narrow
        return shapes[0][arguments["dim"]]
    if name in ("split_size", "split_sizes"):
        lengths = [shape[arguments["dim"]] for shape in shapes]
        return lengths if isinstance(arguments[name], list) else lengths[0]
    return shapes[0]


def _over(size: int, by: int) -> int:
    return size // by if by else 0


def _text(combination: Combination) -> str:
    relation = combination.relation
    kinds = [
        f"{tensor}: {combination.layouts.get(tensor, 'static')}" for tensor in (*relation.inputs, *relation.outputs)
    ]
    literals = {name: value for name, value in relation.operator.arguments if not isinstance(value, Ref)}
    return f"{relation.operator.name} {literals} at {', '.join(kinds)}"
