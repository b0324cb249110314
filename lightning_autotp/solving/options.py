"""What a user says of a plan, in one object, which is also the one place that documents it."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.step_size import TokensPerStep
from lightning_autotp.solving.cost import Profile

Taker = TypeVar("Taker", bound=Callable[..., Any])


@dataclass(frozen=True)
class PlanOptions:
    """How to come by a plan: what ``make_plan``, ``parallelize``, both strategies and the command take, by these names.

    Attributes:
        tokens_per_step: what one forward and backward pass of one copy of the model will be given: a number of tokens,
            or (sequences, tokens of each). The plan is the cheapest for that. Where it is left out, under the Trainer
            the first batch of a ``DataLoader`` over a map-style dataset, given to ``trainer.fit`` or from
            ``train_dataloader()``, tells it; else it is 16,384 tokens.
        keep_whole: names of parameters or modules, or patterns of them (``["lm_head", "model.vision_tower.*"]``), that
            stay whole on every rank.
        cut: by name or pattern, the dim along which parameters are cut (``{"lm_head.weight": 0}``).
        profile: the hardware to plan for.
        memory: bytes of a GPU that parameters, gradients and optimizer states (two, as AdamW has) may take. Then the
            matrices are stored whole where that is faster and there is room, and the plan says what it takes; where no
            plan fits, there is a warning. With ``None`` no limit is assumed: a matrix that is stored whole has a price
            in any case. ``"device"`` is for the strategies: as much as lets the first training step, rehearsed without
            values and with AdamW, fit into the GPU that has the least memory; with several copies, where that makes the
            step shorter. It is as ``None`` where that is not known (on CPUs; where nothing is trained, or several
            models are; without a batch of a step's own size), and with ``cpu_offload``.
        plan: a plan to follow, or its file, instead of making one: of this model for so many ranks, made by
            :func:`~lightning_autotp.make_plan` or ``lightning-autotp plan --json``, perhaps edited since. It is proved
            like any other. The first rank's counts, so only there the file is needed.
        plan_cache: where plans are kept, so that the next start of the same model need not plan: a directory, ``True``
            for ``$LIGHTNING_AUTOTP_PLANS`` or the user's cache directory, ``False`` for nowhere. The first rank's.
        sequence_parallel: shard the tokens between tensor-parallel regions (norms, dropouts, residual adds), so that
            each rank holds its tokens' activations there; ``"auto"``: where that costs no time.
        async_tensor_parallel: let compiled code overlap products with the collectives of sharded tokens, on devices
            that share memory (NVLink): all code that this process compiles while the model is there. Needs
            ``sequence_parallel`` and compiled blocks. Rank 0 prints before the second training step how many products
            do.
        traced_with: where the call that is traced comes from, if there is more to say than whether it was given. Not
            the user's to say.
        device: where the model will run, for code that asks; by default where its parameters are. What takes it says
            it in its own words: a strategy knows it.

    Raises:
        ValueError: for a number of tokens or bytes that is none, or for options that exclude each other.
    """

    tokens_per_step: int | tuple[int, int] | TokensPerStep | None = None
    keep_whole: Iterable[str] = ()
    cut: Mapping[str, int] | None = None
    profile: Profile | None = None
    memory: float | Literal["device"] | None = "device"
    plan: Plan | str | os.PathLike[str] | None = None
    plan_cache: bool | str | os.PathLike[str] = True
    sequence_parallel: bool | Literal["auto"] = False
    async_tensor_parallel: bool = False
    traced_with: str = ""
    device: str = ""

    def __post_init__(self) -> None:
        if self.sequence_parallel not in (True, False, "auto"):
            raise ValueError(f'sequence_parallel is {self.sequence_parallel!r}: it must be True, False or "auto"')
        if self.async_tensor_parallel and not self.sequence_parallel:
            raise ValueError(
                "async_tensor_parallel=True overlaps products with the gathers and reduce-scatters of sharded tokens:"
                " set sequence_parallel=True as well"
            )
        # Copies: an iterator can be read once, and what a user has given may change.
        names = (self.keep_whole,) if isinstance(self.keep_whole, str) else tuple(self.keep_whole)
        object.__setattr__(self, "keep_whole", names)
        object.__setattr__(self, "cut", dict(self.cut or {}))
        if self.plan is not None and (self.keep_whole or self.cut or self.limit is not None):
            raise ValueError(
                "plan= is followed as it is: give keep_whole=, cut= and memory= when the plan is made, or edit it"
            )
        if self.memory not in ("device", None) and not (self.limit or 0) > 0:
            raise ValueError(
                f'memory is {self.memory!r}: it must be a positive number of bytes, such as 60e9, "device" or None'
            )
        TokensPerStep.given(self.tokens_per_step)

    @property
    def tokens(self) -> TokensPerStep:
        """The step that the plan is to be the cheapest for."""
        return TokensPerStep.given(self.tokens_per_step)

    @property
    def limit(self) -> float | None:
        """Bytes that parameters, gradients and optimizer states may take, if there is a limit yet."""
        return None if isinstance(self.memory, str) else self.memory

    @property
    def hardware(self) -> Profile:
        """What the plan is priced for."""
        return self.profile or Profile()


def documented_by(*sources: Any) -> Callable[[Taker], Taker]:
    """Let what takes a parameter say of it what the docstring of another function or class says.

    A decorator: it completes the ``Args`` of the docstring, in the order of the parameters, which is what ``help`` and
    the command line (jsonargparse) show. What the docstring says of a parameter itself stays.

    Args:
        *sources: whose docstrings; the first one that describes a parameter counts.
    """

    def complete(taker: Taker) -> Taker:
        if taker.__doc__:  # there are none under python -OO
            described = {name: text for one in (*reversed(sources), taker) for name, text in described_in(one).items()}
            entries = "".join(described.get(name, "") for name in inspect.signature(taker).parameters)
            taker.__doc__ = _ARGUMENTS.sub(lambda found: found[1] + entries, _text(taker), count=1)
        return taker

    return complete


_ARGUMENTS = re.compile(r"^((?:Args|Attributes):\n)((?:    .*\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    \*{0,2}(\w+): .*\n(?:     +.*\n)*", re.MULTILINE)


def described_in(source: Any) -> dict[str, str]:
    """The lines about each parameter, or attribute, in a docstring."""
    found = _ARGUMENTS.search(_text(source))
    return {entry[1]: entry[0] for entry in _ENTRY.finditer(found[2])} if found else {}


def _text(source: Any) -> str:
    return inspect.cleandoc(source.__doc__ or "") + "\n"


def read(file: str | os.PathLike[str]) -> Plan:
    """The plan in a file that ``lightning-autotp plan --json`` wrote.

    Raises:
        ValueError: if there is none.
    """
    try:
        return Plan.from_json(Path(file).read_text())
    except OSError as error:
        raise ValueError(f"plan={str(file)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"plan={str(file)!r}: {error}") from error
