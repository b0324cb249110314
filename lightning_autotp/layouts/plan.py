"""The plan: everything about a parallel model that every rank must know, as frozen plain data.

Analysis (capture, rules, solver) ends in a plan; execution (replace, verify, load, checkpoints) begins with one. It
needs no torch and no process group, travels as JSON, and prints as a table.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from lightning_autotp.layouts.dims import Axis, Concat, Cut, Dim, Product
from lightning_autotp.layouts.dotted import DottedName
from lightning_autotp.layouts.ownership import Ownership, Run
from lightning_autotp.layouts.places import CallSite, said_of
from lightning_autotp.layouts.repeats import Entry, by_rank, by_reason, counted, rows_of
from lightning_autotp.layouts.transitions import Pair
from lightning_autotp.layouts.types import Invariant, Layout, Partial, Replicate, Shard, local_shape
from lightning_autotp.layouts.units import in_units

if TYPE_CHECKING:
    from rich.console import Group

_TYPES: dict[str, Layout] = {"I": Invariant(), "R": Replicate(), "P": Partial()}


@dataclass(frozen=True)
class Reason:
    """Why a parameter is not cut along one of its dims.

    Attributes:
        dim: which.
        length: how long it is.
        why: what stands against it, in words.
        operator: the first operator that refuses: the nearest one to the parameter along the axis of that dim; empty
            where none does.
        module: the path of the module that runs it.
        source: file, line and code of the call.
    """

    dim: int
    length: int
    why: str
    operator: str = ""
    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{said_of(self.operator, self.module, self.source)}: {self.why}" if self.operator else self.why


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter of the original model.

    Attributes:
        names: all its names; tied parameters have several.
        shape: whole shape.
        itemsize: bytes of an element.
        layout: how it lies over the ranks.
        reasons: where it is left whole, why: one for every dim, the most telling first.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int
    layout: Layout
    reasons: tuple[Reason, ...] = ()

    @property
    def reason(self) -> str:
        """Why it is left whole, in one line: the most telling dim's reason.

        Empty for a vector, such as a norm's weight or a bias: it is as what it is used with, and next to nothing.
        """
        return str(self.reasons[0]) if len(self.shape) > 1 and self.reasons else ""

    @property
    def _cuts(self) -> tuple[tuple[int, Ownership], ...]:
        """The dims that are cut, and which rank has which of their indices."""
        return self.layout.dims if isinstance(self.layout, Shard) else ()

    def local_of_whole(self, rank: int) -> str:
        """Its shape, with a rank's part of each dim that is cut, and what is special: ``96/144 x 8 (shared)``."""
        both = zip(local_shape(self.shape, self.layout, rank), self.shape, strict=True)
        shape = " x ".join(str(whole) if part == whole else f"{part}/{whole}" for part, whole in both) or "scalar"
        notes = ["gradients summed"] if isinstance(self.layout, Replicate) else []
        notes += [note for _, owned in self._cuts for note in owned.notes]
        return f"{shape} ({', '.join(notes)})" if notes else shape

    def described(self) -> str:
        """Its layout or, where it is whole, every dim's reason, one a line."""
        cuts = [f"dim {dim}" + (f" ({', '.join(owned.notes)})" if owned.notes else "") for dim, owned in self._cuts]
        how = f"cut along {', '.join(cuts)}" if cuts else "whole"
        return "\n  ".join([f"{self.names[0]}: {how}", *self.reason_of_each_dim()])

    def reason_of_each_dim(self) -> list[str]:
        """Why it is not cut along its dims, in their order; empty where it is cut."""
        return [f"dim {r.dim} ({r.length}): {r}" for r in sorted(self.reasons, key=lambda reason: reason.dim)]

    @property
    def in_common(self) -> int:
        """Elements that every rank holds."""
        cut = {dim: owned.in_common for dim, owned in self.layout.dims} if isinstance(self.layout, Shard) else {}
        return math.prod(cut.get(dim, size) for dim, size in enumerate(self.shape))

    def bytes(self, rank: int) -> int:
        """Bytes that a rank holds of it."""
        return math.prod(local_shape(self.shape, self.layout, rank)) * self.itemsize


@dataclass(frozen=True)
class ImplementationPlan:
    """An operator that a parallel implementation runs.

    Attributes:
        module: path of the module that becomes a parallel layer; or whose code makes the call.
        name: the implementation's name, such as ``"column"``, ``"row"`` or ``"vocab"``.
        input: the change of type that it makes on its input by itself, such as ``("I", "R")``.
        output: the one that it makes on its result.
        call: which call, where it is no whole layer.
        layout: how the call's operand lies, where the call is made in another way than by the model.
    """

    module: str
    name: str
    input: Pair | None = None
    output: Pair | None = None
    call: CallSite | None = None
    layout: Layout | None = None


@dataclass(frozen=True)
class ConversionPlan:
    """A layout changes where a tensor enters or leaves a module, or at a call in the module's own code.

    Attributes:
        module: its path.
        side: ``"in"`` or ``"out"``; at a call ``"argument"`` or ``"result"``.
        key: which input or output, as a pytree path; at a call the number of the leaf.
        source: layout before.
        target: layout after.
        shape: the tensor's whole shape in the trace.
        view: whether the tensor stays sharded, but is shown to the code outside as if it were whole (logits).
        call: which call.
        overwritten: whether code goes on to change the tensor in place, so that it needs memory of its own.
        updated: whether the call writes into the tensor (running statistics): the ranks' parts are gathered after it.
    """

    module: str
    side: str
    key: str
    source: Layout
    target: Layout
    shape: tuple[int, ...]
    view: bool = False
    call: CallSite | None = None
    overwritten: bool = False
    updated: bool = False


@dataclass(frozen=True)
class SizePlan:
    """A size that a module keeps in Python and that must be local.

    Attributes:
        module: path of the module that reads it.
        attribute: its integer attribute, or ``config.NAME`` for the module's own copy of its config; at a call the
            number of the leaf of its arguments.
        whole: the value in the original model.
        local: each rank's value.
        call: the call that the number is an argument of, where it is no attribute.
    """

    module: str
    attribute: str
    whole: int
    local: tuple[int, ...]
    call: CallSite | None = None

    def __str__(self) -> str:
        where = self.attribute if self.call is None else f"argument {self.attribute} of {self.call}"
        are_many_alike = len(self.local) > _LISTED and len(set(self.local)) == 1
        local = f"{self.local[0]} on each rank" if are_many_alike else list(self.local)
        return f"{self.module or '(root)'}: {where}: {self.whole} -> {local}"


@dataclass(frozen=True)
class DrawPlan:
    """A call that draws random numbers for a sharded tensor: each rank draws its own.

    Attributes:
        module: path of the module whose code makes it.
        call: which call.
    """

    module: str
    call: CallSite


@dataclass(frozen=True)
class IndicesPlan:
    """A function that a kernel calls with indices of a sharded dim: it is given those of the whole model.

    Attributes:
        module: path of the module whose code calls the kernel.
        call: which call.
        leaf: which leaf of the call's arguments the function is, or the object that has it.
        attribute: the object's attribute that is the function; empty for a function among the arguments.
        place: which of its arguments is the index.
        held: for every rank, the runs of indices that it has.
    """

    module: str
    call: CallSite
    leaf: int
    attribute: str
    place: int
    held: tuple[tuple[Run, ...], ...]


@dataclass(frozen=True)
class MadeLocalPlan:
    """A call that makes a tensor without parameters (zeros, say) with the sizes of a sharded one: local right away.

    Attributes:
        module: path of the module whose code makes it.
        call: which call.
    """

    module: str
    call: CallSite


@dataclass(frozen=True)
class RunPlan:
    """Which calls with changes one run of a module makes, where its runs in a step do not all make the same ones.

    Attributes:
        module: its path.
        sites: these calls.
    """

    module: str
    sites: tuple[CallSite, ...]


@dataclass(frozen=True)
class Communication:
    """Collectives of one training step, by kind: forward and backward.

    Attributes:
        kind: which.
        calls: how many.
        bytes: of the undivided tensors, in a step of the traced batch.
        priced_bytes: likewise, in the step that the plan is priced for; 0 where it is priced for none.
    """

    kind: str
    calls: int
    bytes: int
    priced_bytes: int = 0


@dataclass(frozen=True)
class WholeWork:
    """An operator of which every rank computes all.

    Attributes:
        operator: its name.
        module: the module that calls it, without the numbers of layers.
        calls: how many such calls there are.
        share: their share of the forward's floating-point operations; 0 where these are not known.
        why: what stands against cutting it.
        is_unknown: whether it has no rule, or its module could not be traced.
        seconds: how long they take in the step that the plan is priced for, forward and backward, by the profile.
    """

    operator: str
    module: str
    calls: int
    share: float
    why: str
    is_unknown: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        often = f"{self.calls} x " if self.calls > 1 else ""
        share = f", {self.share:.1%} of the FLOPs, about {1e3 * self.seconds:.2g} ms of a step" if self.share else ""
        return f"{often}{self.operator} in {self.module or 'the model'}{share}: {self.why}"


@dataclass(frozen=True)
class Plan:
    """How a model is split over the ranks of a tensor-parallel group.

    Attributes:
        model: the model's class name.
        ranks: number of ranks.
        parameters: every parameter.
        implementations: operators that a parallel implementation runs.
        conversions: layout changes at other modules' boundaries.
        sizes: sizes in Python that become local.
        draws: calls at which each rank draws its own random numbers.
        indices: functions that kernels call, and that are given the whole model's indices.
        made_local: calls whose tensors without parameters come out local by themselves.
        runs: of modules that are run several times and not always make the same calls: which ones.
        opaque: modules that were not looked into.
        modules: a short hash of what each module's own code runs, to tell another model by.
        communication: what one step communicates.
        priced_for: the size of the step that it is the cheapest for, and who said so.
        gap: the share of a step's price that another plan could save at most; 0 where this is the cheapest.
        traced_with: where the call that was traced comes from.
        device: the type of device that the model was to run on.
        traced_on: the type of device that the traced tensors seemed to be on: another one where the build of torch that
            traced has no such devices.
        kept_parts: attributes of modules that are this rank's part of a tensor after a forward.
        whole_tokens: where sequence parallelism was asked for, and tokens are still whole: where, if
            elsewhere they are; else why.
        divided_work: the share of the forward's floating-point operations that is divided, in the priced step; negative
            where there are none.
        whole_work: the operators of which every rank computes all, the largest first.
        memory_limit: bytes of a rank that it was made for; 0 without a limit.
        memory_needed: bytes that parameters, gradients and optimizer states take, where there is a limit; of one that
            is of a device, those of a training step.
        limit_of: whose memory the limit is, where none was given.
    """

    model: str
    ranks: int
    parameters: tuple[ParameterPlan, ...]
    implementations: tuple[ImplementationPlan, ...] = ()
    conversions: tuple[ConversionPlan, ...] = ()
    sizes: tuple[SizePlan, ...] = ()
    draws: tuple[DrawPlan, ...] = ()
    indices: tuple[IndicesPlan, ...] = ()
    made_local: tuple[MadeLocalPlan, ...] = ()
    runs: tuple[RunPlan, ...] = ()
    opaque: tuple[str, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    communication: tuple[Communication, ...] = ()
    priced_for: str = ""
    gap: float = 0.0
    traced_with: str = ""
    device: str = ""
    traced_on: str = ""
    whole_tokens: tuple[str, ...] = ()
    kept_parts: tuple[str, ...] = ()
    divided_work: float = -1.0
    whole_work: tuple[WholeWork, ...] = ()
    memory_limit: int = 0
    memory_needed: int = 0
    limit_of: str = ""

    @property
    def shards_sequence(self) -> bool:
        """Whether tokens of sequences are sharded over the ranks somewhere."""
        layouts = [layout for change in self.conversions for layout in (change.source, change.target)]
        return any(isinstance(layout, Shard) and layout.grows for layout in layouts)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(_encode(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: if the text is not a plan.
        """
        try:
            data = json.loads(text)
            return cls(
                model=data["model"],
                ranks=data["ranks"],
                parameters=tuple(_decode(ParameterPlan, item) for item in data["parameters"]),
                implementations=tuple(_decode(ImplementationPlan, item) for item in data["implementations"]),
                conversions=tuple(_decode(ConversionPlan, item) for item in data["conversions"]),
                sizes=tuple(_decode(SizePlan, item) for item in data["sizes"]),
                draws=tuple(_decode(DrawPlan, item) for item in data["draws"]),
                indices=tuple(_decode(IndicesPlan, item) for item in data.get("indices", ())),
                made_local=tuple(_decode(MadeLocalPlan, item) for item in data["made_local"]),
                runs=tuple(_decode(RunPlan, item) for item in data["runs"]),
                opaque=tuple(data["opaque"]),
                modules=tuple((module, digest) for module, digest in data["modules"]),
                communication=tuple(_decode(Communication, item) for item in data["communication"]),
                priced_for=data["priced_for"],
                gap=data["gap"],
                traced_with=data["traced_with"],
                device=data.get("device", ""),
                traced_on=data.get("traced_on", ""),
                whole_tokens=tuple(data["whole_tokens"]),
                kept_parts=tuple(data.get("kept_parts", ())),
                divided_work=data.get("divided_work", -1.0),
                whole_work=tuple(_decode(WholeWork, item) for item in data.get("whole_work", ())),
                memory_limit=data.get("memory_limit", 0),
                memory_needed=data.get("memory_needed", 0),
                limit_of=data.get("limit_of", ""),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is not a plan written by Plan.to_json: {error!r}") from error

    @property
    def digest(self) -> str:
        """A short hash; equal plans have equal ones."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def bytes(self, rank: int) -> int:
        """Parameter bytes that a rank holds."""
        return sum(parameter.bytes(rank) for parameter in self.parameters)

    @property
    def whole_bytes(self) -> int:
        """Parameter bytes of the whole model."""
        return sum(math.prod(parameter.shape) * parameter.itemsize for parameter in self.parameters)

    @property
    def sharded_fraction(self) -> float:
        """Share of the parameter elements that not every rank holds."""
        total = sum(math.prod(parameter.shape) for parameter in self.parameters)
        everywhere = sum(parameter.in_common for parameter in self.parameters)
        return 1 - everywhere / max(total, 1)

    @property
    def losses_in_parts(self) -> tuple[str, ...]:
        """Heads whose logits are computed where something needs them, and a cross-entropy of a few tokens at a time."""
        column = {use.module for use in self.implementations if use.name == "column" and use.call is None}
        shown = [change for change in self.conversions if change.view and change.call is None]
        return tuple(x.module for x in shown if x.side == "out" and not x.key and x.module in column)

    @property
    def summary(self) -> str:
        """The plan in one line: the work and memory that are divided, and what is computed whole costs."""
        whole = sum(not isinstance(parameter.layout, Shard) for parameter in self.parameters)
        calls = sum(one.calls for one in self.communication)
        of_work = f"{self.divided_work:.1%} of the FLOPs and " if self.divided_work >= 0 else ""
        divided = f"{of_work}{self.sharded_fraction:.1%} of the parameters are divided"
        every = sum(one.calls for one in self.whole_work)
        spent = f"{1e3 * sum(one.seconds for one in self.whole_work):.2g} ms of a step"
        sizes = {parameter.itemsize for parameter in self.parameters}
        in_bits = f" in {8 * min(sizes)} bits" if len(sizes) == 1 else ""
        cost = f" (every rank computes all of {every} operators, about {spent})" if every else ""
        return (
            f"{self.model} on {self.ranks} ranks: {divided}{cost},"
            f" {whole} of {len(self.parameters)} tensors stay whole; rank 0 stores"
            f" {in_units(self.bytes(0))} of {in_units(self.whole_bytes)}{in_bits}; {calls} collectives in a step"
        )

    @property
    def traced(self) -> str:
        """What was traced, and as on which device, in one line."""
        on = f", as on {self.traced_on}" if self.traced_on else ""
        if self.device != self.traced_on:
            on += (
                f" and not as on {self.device}, which that build of torch does not have: code that asks for its device"
                " may run otherwise there"
            )
        return f"traced with {self.traced_with}{on}"

    @property
    def of_memory(self) -> str:
        """Which limit of memory it was made for, and whether it fits, in one line."""
        if not self.memory_limit:
            return "made for no limit of memory: a matrix that stays whole has a price in any case"
        needed, limit = in_units(self.memory_needed), in_units(self.memory_limit)
        if self.limit_of:
            taken = f"a training step takes about {needed} of {limit} of {self.limit_of}"
            does = "made to fit" if self.memory_needed <= self.memory_limit else "warning: no plan fits"
            return f"{does}: {taken} (predicted, with AdamW)"
        what = f"parameters, gradients and optimizer states take {needed} of {limit} on a tensor-parallel rank"
        if self.memory_needed <= self.memory_limit:
            return f"made to fit: {what}"
        return f"warning: no plan fits: {what}. Use more ranks or copies, or train fewer parameters"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What every rank computes whole although it is much, or because it is not declared how it may be divided."""
        return tuple(str(work) for work in self.whole_work if work.is_unknown or work.share > _MUCH)

    def table(self, rank: int = 0, details: bool = True) -> Group:
        """The plan for rich to print: what is sharded, one rank's shapes and bytes, and what stayed whole.

        Args:
            rank: whose shapes and bytes.
            details: whether to say what changes in calls, and why tensors stay whole.
        """
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = f"{self.model} on {self.ranks} tensor-parallel ranks (rank {rank} shown)"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
        table.add_column("parameter")
        table.add_column("layer")
        table.add_column("local/global")
        table.add_column("size", justify="right", no_wrap=True)
        for row in rows_of(self.entries(rank)):
            table.add_row(DottedName(row.name), *(row.cells or ("", "")), row.size)
        lines = [*self._totals(), *self._tokens()]
        more = [*self.remarks()]
        if details or len(more) < 2:
            lines += more
        else:
            lines.append(f"{len(more)} lines more: sizes in Python code, what is whole and why, ... (--details)")
        return Group(table, Text("\n".join(lines)))

    def remarks(self) -> Iterator[str]:
        """What is different in calls and attributes, what every rank computes whole, and why tensors are whole."""
        yield from self.differences()
        whole = [(parameter.names[0], parameter.reason) for parameter in self.parameters if parameter.reason]
        yield from (f"whole on every rank: {names}: {reason}" for names, reason in by_reason(whole))

    def differences(self) -> Iterator[str]:
        """What is different in calls and attributes, and what every rank computes whole."""
        lines = [*counted(map(str, self.sizes))]
        lines += [f"after a forward each rank has its part of the attribute {name}" for name in self.kept_parts]
        lines += [
            f"{head}: its loss is computed a few tokens at a time, exactly; all logits only"
            " where something else needs them"
            for head in self.losses_in_parts
        ]
        lines += counted(
            f"{use.name} runs in the place of {use.call} in {use.module or 'the model'}"
            for use in self.implementations
            if use.call is not None and use.layout is not None
        )
        lines += [f"every rank computes all of {work}" for work in self.whole_work[:_SHOWN]]
        if self.draws:
            lines.append(
                "each rank draws its own random numbers for its part of a tensor, which are not those of one process"
                " (they are where keep_whole= names the module):"
            )
            lines += counted(f"  {draw.module or repr(draw.module)}: {draw.call}" for draw in self.draws)
        lines += counted(
            f"{one.module or repr(one.module)}: a function that {one.call} calls is given the original model's indices"
            for one in self.indices
        )
        yield from lines

    @property
    def layers(self) -> dict[str, str]:
        """By a module's path the parallel layer that it becomes, such as ``"column"``."""
        return {use.module: use.name for use in self.implementations if use.call is None}

    def entries(self, rank: int) -> Iterator[Entry]:
        """What the table says of each parameter: its layer, and a rank's shape of it."""
        layers = self.layers
        for parameter in self.parameters:
            layer = layers.get(parameter.names[0].rpartition(".")[0], "")
            like = parameter.shape, parameter.layout, layer
            yield Entry(parameter.names, like, (layer, parameter.local_of_whole(rank)), parameter.bytes(rank))

    def _totals(self) -> Iterator[str]:
        stored = by_rank([in_units(self.bytes(rank)) for rank in range(self.ranks)])
        yield f"parameters: {stored}, of {in_units(self.whole_bytes)}"
        if self.priced_for:
            found = f"another plan could save {self.gap:.1%} at most" if self.gap else "exact: no plan is cheaper"
            yield f"priced for a step of {self.priced_for}; {found}"
        if self.communication and self.priced_for:
            sent = (f"{one.calls} x {one.kind} ({in_units(one.priced_bytes)})" for one in self.communication)
            yield f"such a step sends {', '.join(sent)}"
        elif self.communication:
            yield f"a step sends {', '.join(f'{one.calls} x {one.kind}' for one in self.communication)}"
        yield self.of_memory
        if self.traced_with:
            yield self.traced

    def _tokens(self) -> Iterator[str]:
        if self.shards_sequence:
            yield "sequence parallel: between sharded regions each rank has a part of the tokens"
        where = " in" if self.shards_sequence else ":"
        yield from (f"every rank has all tokens{where} {why}" for why in self.whole_tokens)


_LISTED = 4
"""Ranks of which each one's size is listed, also where all are the same."""
_SHOWN = 8
"""Operators that a table names of which every rank computes all."""
_MUCH = 0.05
"""Share of the FLOPs of which a start says that every rank computes it."""


def _encode(value: Any) -> Any:
    """Dataclasses as dicts, layouts as :func:`encode_layout` writes them."""
    if isinstance(value, Invariant | Replicate | Partial | Shard):
        return encode_layout(value)
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    return value


def _decode(kind: Any, item: dict[str, Any]) -> Any:
    values = {}
    for field in fields(kind):
        if field.name not in item and field.default is not MISSING:
            continue  # a plan that was written before there was such a field
        value = item[field.name]
        if field.name in ("layout", "source", "target"):
            value = None if value is None else decode_layout(value)
        elif field.name == "reasons":
            value = tuple(Reason(**reason) for reason in value)
        elif field.name == "call" and value is not None:
            value = CallSite(**value)
        elif field.name == "held":
            value = tuple(map(_runs, value))
        elif field.name == "sites":
            value = tuple(CallSite(**site) for site in value)
        elif isinstance(value, list):
            value = tuple(value)
        values[field.name] = value
    return kind(**values)


def encode_layout(layout: Layout) -> Any:
    """A layout as JSON data: a shard by the axes that are sharded, or by its maps where no axes are known."""
    if not isinstance(layout, Shard):
        return str(layout)
    if layout.cuts:
        cuts = zip(layout.dims, layout.cuts, strict=True)
        return {"shard": [{"dim": dim, **_encode_cut(cut)} for (dim, _), cut in cuts]}
    return {"shard": [{"dim": dim, "size": owned.size, "held": owned.held} for dim, owned in layout.dims]}


def _encode_cut(cut: Cut) -> dict[str, Any]:
    return {"of": _encode_dim(cut.dim), "held": cut.held, "grows": sorted(cut.grows), "axes": cut.axes}


def _encode_dim(dim: Dim) -> Any:
    """An axis as its number and size, a product or concatenation as its parts."""
    if isinstance(dim, Axis):
        return [dim.id, dim.size]
    if isinstance(dim, Product):
        return {"product": [_encode_dim(factor) for factor in dim.factors]}
    return {"sections": [_encode_dim(section) for section in dim.sections]}


def decode_layout(data: Any) -> Layout:
    """The layout that :func:`encode_layout` wrote."""
    if isinstance(data, str):
        return _TYPES[data]
    if all("of" in entry for entry in data["shard"]):
        return Shard.of({entry["dim"]: _decode_cut(entry) for entry in data["shard"]})
    return Shard(
        tuple((entry["dim"], Ownership(entry["size"], tuple(map(_runs, entry["held"])))) for entry in data["shard"])
    )


def _decode_cut(entry: Mapping[str, Any]) -> Cut:
    held = tuple(tuple(map(_runs, rank)) for rank in entry["held"])
    return Cut(_decode_dim(entry["of"]), held, frozenset(entry["grows"]), tuple(entry["axes"]))


def _decode_dim(data: Any) -> Dim:
    if isinstance(data, list):
        number, size = data
        return Axis(number, size)
    if "product" in data:
        return Product(tuple(map(_decode_dim, data["product"])))
    return Concat(tuple(map(_decode_dim, data["sections"])))


def _runs(data: Any) -> tuple[Run, ...]:
    return tuple((start, stop) for start, stop in data)
