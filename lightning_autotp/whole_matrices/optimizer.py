"""``WholeMatrixOptimizer``: optimizers that look at whole tensors (Muon, Adafactor, ...), on a parallel model.

Every parameter is assigned to one rank, where an optimizer of its own steps the whole tensor (as in distributed
Shampoo). In a step the ranks' parts of the parameter and of its gradient are gathered there, in the original
coordinates, and the result is scattered. The numbers of elements are balanced over the ranks, and tensors are sent in
rounds, one to each rank: all ranks compute at the same time, and each has one whole parameter and its gradient in
memory. What the optimizer keeps between steps is only on the assigned rank, and whole.

This is right where a parameter's update depends on no other parameter, which is found out by trying.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_autotp.optimizers.stepping import needs_closure, plain_step, stepped_by
from lightning_autotp.optimizers.trial import Unknown, difference, first_that_runs, moving, updates
from lightning_autotp.parameters.local_blocks import is_cut, plain, shard_group
from lightning_autotp.parameters.state import ParameterTable, parallel_models
from lightning_autotp.ranks.agreement import gather_objects, largest_of_all, raise_along
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.whole_matrices.transfers import Sharding, Transfer, balanced, gather, scatter

ALONE = TPGroup("", 0, 1)
"""One rank, which has everything."""
TRIAL_STEPS = 6
"""Enough for what is computed from several parameters, or drawn at random, to show."""
TRIAL_TOLERANCE = 1e-3
"""Greatest difference between two updates that are the same, relative to the greatest update."""
_ABSENT, _DENSE, _SPARSE = range(3)


@dataclass(eq=False)
class _Whole:
    """A parameter, and what is known of the whole of it.

    Attributes:
        parameter: this rank's part.
        group: the number of its parameter group.
        over_ranks: how the whole lies over the tensor-parallel ranks.
        over_data: how this rank's tensor-parallel part lies over the data axis.
        rank: the assigned rank, in the tensor-parallel group.
        copy: the assigned rank's place on the data axis.
        standing: on the assigned rank, what stands for the whole in the optimizer; without memory between steps.
        inner: there, the optimizer, from the first step on.
    """

    parameter: Tensor
    group: int
    over_ranks: Sharding
    over_data: Sharding
    rank: int = 0
    copy: int = 0
    standing: nn.Parameter | None = None
    inner: Optimizer | None = None


class WholeMatrixOptimizer(Optimizer):
    """Steps whole parameters of a parallel model, each on one rank, with an optimizer that needs them whole.

    The weights after a step are one process's. Learning-rate schedules, clipping, accumulation and loss scaling work as
    with any optimizer, and checkpoints hold what one process's optimizer would have put there. In a step each rank
    sends its part of every parameter and of its gradient, and receives its part of the result. Elementwise optimizers
    need none of that, so leave to one of them what need not be stepped whole.

    In a module without a parallel model every parameter is whole, and it is that optimizer: the same
    ``configure_optimizers()`` serves one process.

    Making it is not collective. A step is, over the model's tensor-parallel group, and over the data axis where FSDP2
    has cut the parameters.

    Example::

        def configure_optimizers(self):
            matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
            return WholeMatrixOptimizer(self, matrices, torch.optim.Muon, lr=0.02)

    Args:
        module: a parallel model, or a module that holds one, such as the ``LightningModule``.
        params: parameters or groups, as any optimizer takes them.
        kind: the optimizer's class, or a function of parameter groups and options that makes one.
        options: its other arguments.

    Raises:
        ValueError: where there is more than one rank, if the optimizer cannot be right: a parameter's update depends on
            other parameters or on random numbers, or a step needs a closure or changes options. What ``kind`` itself
            raises about the parameters in their original shapes is raised on every rank.
        RuntimeError: if the model was changed after it was divided.

    Warns:
        UserWarning: if the optimizer cannot be run on trial tensors, so that nothing is known about it.
    """

    def __init__(self, module: nn.Module, params: ParamsT, kind: Callable[..., Optimizer], /, **options: Any) -> None:
        self._module, self._kind, self._options = module, kind, options
        self._wholes: list[_Whole] = []
        self._loads: list[int] = []
        self._ranks, self._copies = ALONE, ALONE
        self._is_made = False
        super().__init__(params, {})
        self._is_made = True
        self._take_up()

    @property
    def kind(self) -> str:
        """The name of the optimizer that steps whole parameters."""
        return str(getattr(self._kind, "__name__", self._kind))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as to any optimizer. Not collective, but every rank must do it."""
        super().add_param_group(param_group)
        if self._is_made:
            self._take_up()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step. Collective over the tensor-parallel group, and over the data axis where FSDP2 cuts.

        Args:
            closure: computes the loss and the gradients; it is called once, on every rank.

        Returns:
            What the closure returned.

        Raises:
            ValueError: on every rank, for sparse gradients.
            PeerError: if the optimizer failed on another rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        errors: list[Exception] = []
        for wholes in self._rounds():
            self._step_round(wholes, errors)
        groups = [group.process_group for group in self._groups()]
        with raise_along(groups, f"stepping whole tensors with {self.kind}"):
            if errors:
                raise errors[0]
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load whole states, of which this rank keeps those of the parameters assigned to it. Not collective."""
        super().load_state_dict(dict(state_dict))
        for whole in self._wholes:
            whole.inner = whole.standing = None
            if not self.is_assigned_here(whole.parameter):
                self.state.pop(whole.parameter, None)

    def is_assigned_here(self, parameter: Tensor) -> bool:
        """Whether this rank steps a parameter and has its state."""
        return any(whole.parameter is parameter and self._is_here(whole) for whole in self._wholes)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a WholeMatrixOptimizer cannot be copied or pickled: it belongs to a parallel model in this process. Make a"
            " new one, and load this one's state"
        )

    # --- the state, for checkpoints ---

    def described_state(self) -> dict[int, dict[str, Any]]:
        """What all ranks have in their states. Collective as a step is.

        Returns:
            By the parameters' numbers, as in ``state_dict()``: this rank's own values, and other ranks', with tensors
            on meta.
        """
        own = self.state_dict()["state"]
        described = {
            number: {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in values.items()}
            for number, values in own.items()
        }
        for group in self._groups():
            described = {
                number: values
                for part in gather_objects(described, group.process_group)
                for number, values in part.items()
            }
        return {number: own.get(number, values) for number, values in sorted(described.items())}

    def from_assigned(self, number: int, value: Tensor) -> Tensor:
        """A tensor of :meth:`described_state` from the rank that has it. Collective as a step is.

        Returns:
            The tensor, on the parameter's device or, where it is from here, its own.
        """
        whole = self._numbered()[number]
        here = self._is_here(whole)
        device = plain(whole.parameter).device
        found = value.detach().to(device).contiguous() if here else torch.empty_like(value, device=device)
        if found.numel() == 0:
            return found
        content = found.view(-1).view(torch.uint8)
        for group, assigned, has_it in (
            (self._copies, whole.copy, self._ranks.rank == whole.rank),
            (self._ranks, whole.rank, True),
        ):
            if group.size > 1 and has_it:
                dist.broadcast(content, dist.get_global_rank(group.process_group, assigned), group.process_group)
        return value if here else found

    # --- which rank has what ---

    def _take_up(self) -> None:
        """Learn what the parameters are that came since the last time, and assign them to ranks."""
        table = ParameterTable(self._module) if parallel_models(self._module) else None
        known = {id(whole.parameter) for whole in self._wholes}
        added = [
            (number, parameter)
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if id(parameter) not in known
        ]
        cut_over = shard_group(*(parameter for _, parameter in added))
        copies = self._copies if cut_over is None else TPGroup.of(cut_over)
        if self._wholes and copies != self._copies:
            raise ValueError("FSDP2 has sharded the added parameters, but not the earlier ones: make a new optimizer")
        self._copies = copies
        self._ranks = ALONE if table is None else table.group
        wholes = []
        for number, parameter in added:
            meta = None if table is None else table.meta(parameter)
            part = tuple(parameter.shape)
            shape, layout = (part, None) if meta is None else (meta.shape, meta.layout)
            over_ranks = Sharding.of_layout(shape, layout, self._ranks.size)
            is_in_rows = is_cut(parameter)
            over_data = (
                Sharding.of_rows(part, copies.size) if is_in_rows else Sharding.of_layout(part, None, copies.size)
            )
            wholes.append(_Whole(parameter, number, over_ranks, over_data))
        self._take_defaults(wholes)
        self._loads = self._loads or [0] * (self._ranks.size * copies.size)
        assigned = balanced([whole.over_ranks.elements for whole in wholes], self._loads)
        for whole, number in zip(wholes, assigned, strict=True):
            whole.copy, whole.rank = divmod(number, self._ranks.size)
        self._wholes += wholes
        if len(self._loads) > 1:
            self._try()

    def _take_defaults(self, wholes: Sequence[_Whole]) -> None:
        """Let the optimizer look at the parameters in their original shapes, and take its options for the groups."""
        for number in sorted({whole.group for whole in wholes}):
            group = self.param_groups[number]
            on_meta = [
                nn.Parameter(torch.empty(whole.over_ranks.shape, dtype=whole.parameter.dtype, device="meta"))
                for whole in wholes
                if whole.group == number
            ]
            made = self._make([{**_options(group), "params": on_meta}])
            for key, value in _options(made.param_groups[0]).items():
                group.setdefault(key, value)
            self.defaults = made.defaults

    def _make(self, groups: list[dict[str, Any]]) -> Optimizer:
        return self._kind(groups, **self._options)

    def _numbered(self) -> list[_Whole]:
        """The parameters by their numbers in ``state_dict()``."""
        wholes = {id(whole.parameter): whole for whole in self._wholes}
        return [wholes[id(parameter)] for parameter in stepped_by(self)]

    def _is_here(self, whole: _Whole) -> bool:
        return (whole.rank, whole.copy) == (self._ranks.rank, self._copies.rank)

    def _groups(self) -> list[TPGroup]:
        """Those over which a step is collective."""
        return [group for group in (self._copies, self._ranks) if group.size > 1]

    # --- steps ---

    def _rounds(self) -> list[list[_Whole]]:
        """The parameters that have a gradient on some rank, at most one for each rank at a time. Collective."""
        kinds = [
            _ABSENT if p.grad is None else _SPARSE if plain(p.grad).is_sparse else _DENSE
            for p in (whole.parameter for whole in self._wholes)
        ]
        for group in self._groups():
            kinds = largest_of_all(kinds, group.process_group)
        if _SPARSE in kinds:
            raise ValueError(
                "a WholeMatrixOptimizer does not take sparse gradients: leave out sparse=True of the embedding, or give"
                " its weight to another optimizer"
            )
        present = [whole for whole, kind in zip(self._wholes, kinds, strict=True) if kind != _ABSENT]
        present.sort(key=lambda whole: -whole.over_ranks.elements)
        # What is sent together is on one device.
        by_device: dict[str, dict[tuple[int, int], list[_Whole]]] = {}
        for whole in present:
            by_rank = by_device.setdefault(whole.parameter.device.type, {})
            by_rank.setdefault((whole.rank, whole.copy), []).append(whole)
        rounds = [together for by_rank in by_device.values() for together in itertools.zip_longest(*by_rank.values())]
        return [[whole for whole in together if whole is not None] for together in rounds]

    def _step_round(self, wholes: Sequence[_Whole], errors: list[Exception]) -> None:
        """Step these parameters, each on its rank. Collective; what the optimizer raises is noted in ``errors``."""
        parts = [plain(whole.parameter) for whole in wholes]
        gradients = [
            torch.zeros_like(part) if whole.parameter.grad is None else plain(whole.parameter.grad)
            for whole, part in zip(wholes, parts, strict=True)
        ]
        # Over the data axis to the assigned rank's copy of the model, and there over the tensor-parallel ranks.
        twice = [*wholes, *wholes]
        joined = gather(
            [
                Transfer(whole.copy, whole.over_data, part)
                for whole, part in zip(twice, [*parts, *gradients], strict=True)
            ],
            self._copies,
        )
        here = [whole for whole in wholes if whole.copy == self._copies.rank]
        of_copy = [part for part in joined if part is not None]
        values = gather(
            [Transfer(whole.rank, whole.over_ranks, part) for whole, part in zip([*here, *here], of_copy, strict=True)],
            self._ranks,
        )
        results = [
            None if value is None or gradient is None else self._step_whole(whole, value, gradient, errors)
            for whole, value, gradient in zip(here, values[: len(here)], values[len(here) :], strict=True)
        ]
        back = [
            Transfer(whole.rank, whole.over_ranks, part.new_empty(whole.over_data.shape), result)
            for whole, part, result in zip(here, of_copy[: len(here)], results, strict=True)
        ]
        scatter(back, self._ranks)
        arrived = dict(zip(map(id, here), back, strict=True))
        scatter(
            [
                Transfer(whole.copy, whole.over_data, part, arrived[id(whole)].part if id(whole) in arrived else None)
                for whole, part in zip(wholes, parts, strict=True)
            ],
            self._copies,
        )

    def _step_whole(self, whole: _Whole, value: Tensor, gradient: Tensor, errors: list[Exception]) -> Tensor:
        """What a parameter is after the step. Other ranks wait for it: what the optimizer raises is only noted."""
        options = _options(self.param_groups[whole.group])
        try:
            if whole.standing is None or whole.inner is None:
                whole.standing = nn.Parameter(value)
                whole.inner = self._make([{**options, "params": [whole.standing]}])
            standing, inner = whole.standing, whole.inner
            standing.data, standing.grad = value, gradient
            if whole.parameter in self.state:
                inner.state[standing] = self.state[whole.parameter]
            inner.param_groups[0].update(options)  # a schedule may have changed them
            with torch.enable_grad():
                plain_step(inner)(inner)
        except Exception as error:  # of code of any kind
            errors.append(error)
            return value
        if standing in inner.state:
            self.state[whole.parameter] = inner.state[standing]
        result = standing.data
        standing.data, standing.grad = result.new_empty(0), None
        return result

    # --- whether it can be right ---

    def _try(self) -> None:
        """Refuse an optimizer with which it makes a difference whether parameters are stepped together.

        Raises:
            ValueError: if it does, or a step needs a closure or changes options.

        Warns:
            UserWarning: if it cannot be run.
        """
        device = plain(self._wholes[0].parameter).device
        ways = (functools.partial(self._reason_against, device, dtype) for dtype in (torch.float64, torch.float32))
        try:
            reason = first_that_runs(ways, device)
        except Unknown as error:
            warnings.warn(
                f"{self.kind} could not be checked: {error}. It is right in a WholeMatrixOptimizer only if it computes"
                " each tensor's update from that tensor's own gradients",
                stacklevel=3,
            )
            return
        if reason:
            raise ValueError(
                f"{self.kind} is not right in a WholeMatrixOptimizer, which steps each parameter separately, on one"
                f" rank: {reason}. It is for optimizers that compute a tensor's update from that tensor alone (Muon,"
                " Adafactor, LAMB, SOAP)"
            )

    def _reason_against(self, device: torch.device, dtype: torch.dtype) -> str | None:
        kinds = sorted({(whole.group, whole.parameter.dim()) for whole in self._wholes}) * 2
        generator = torch.Generator().manual_seed(11)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

        shapes = [(2,) * (dims - 2) + (6, 4) if dims > 1 else (6,) * dims for _, dims in kinds]
        starts = [normal(*shape) for shape in shapes]
        gradients = [normal(TRIAL_STEPS, *shape) * 3**place for place, shape in enumerate(shapes)]

        def updated(places: Sequence[int]) -> list[Tensor]:
            """The updates of these trial tensors, in groups with the options of the real ones."""
            tensors = [nn.Parameter(starts[place].clone()) for place in places]
            groups: dict[int, dict[str, Any]] = {}
            for place, tensor in zip(places, tensors, strict=True):
                number = kinds[place][0]
                options = moving(copy.deepcopy(_options(self.param_groups[number])))
                groups.setdefault(number, {**options, "params": []})["params"].append(tensor)
            optimizer = self._make(list(groups.values()))
            before = [copy.deepcopy(_options(group)) for group in optimizer.param_groups]
            if needs_closure(optimizer):
                raise _Reason("its step needs a closure, which may compute the gradients again")
            found = updates(optimizer, tensors, [gradients[place] for place in places])
            for old, group in zip(before, optimizer.param_groups, strict=True):
                if changed := [key for key, value in old.items() if not _is_same(value, group[key])]:
                    raise _Reason(f"its step changes the options {', '.join(changed)} of a parameter group")
            return found

        try:
            together = updated(range(len(kinds)))
            alone = [update for place in range(len(kinds)) for update in updated([place])]
        except _Reason as reason:
            return str(reason)
        apart = [difference(one, other) for one, other in zip(together, alone, strict=True)]
        if all(each <= TRIAL_TOLERANCE for each in apart):
            return None
        return "the update of a tensor depends on the other tensors, or on random numbers"


class _Reason(Exception):
    """Why an optimizer cannot be right."""


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)
