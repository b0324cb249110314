"""What a user says of a plan, in one object."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.step_size import TokensPerStep
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.plan_cache import PlanCache


@dataclass(frozen=True)
class PlanOptions:
    """How to come by a plan.

    Attributes:
        tokens: the step that it is to be the cheapest for.
        keep_whole: patterns of parameters or modules that stay whole on every rank.
        cut: by name or pattern, the dim along which parameters are cut.
        profile: the hardware.
        plan: a plan that is there already, or its file: nothing of the above counts then.
        cache: where plans are kept for the next start.
        sequence_parallel: whether tokens are sharded between tensor-parallel regions; ``"auto"``: where that costs no time.
        async_tensor_parallel: whether compiled code overlaps products with the collectives of sharded tokens.
        traced_with: where the call that is traced comes from, if there is more to say than whether it was given.
    """

    tokens: TokensPerStep = field(default_factory=TokensPerStep)
    keep_whole: tuple[str, ...] = ()
    cut: tuple[tuple[str, int], ...] = ()
    profile: Profile = field(default_factory=Profile)
    plan: Plan | Path | None = None
    cache: PlanCache = field(default_factory=lambda: PlanCache(None))
    sequence_parallel: bool | Literal["auto"] = False
    traced_with: str = ""
    async_tensor_parallel: bool = False

    @classmethod
    def given(
        cls,
        *,
        tokens_per_step: int | tuple[int, int] | TokensPerStep | None = None,
        keep_whole: Iterable[str] = (),
        cut: Mapping[str, int] | None = None,
        profile: Profile | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        plan_cache: bool | str | os.PathLike[str] = False,
        sequence_parallel: bool | Literal["auto"] = False,
        async_tensor_parallel: bool = False,
    ) -> PlanOptions:
        """The options as a user writes them; see :func:`lightning_autotp.parallelize`.

        Raises:
            ValueError: for a number of tokens that is none, or for options that exclude each other.
        """
        if sequence_parallel not in (True, False, "auto"):
            raise ValueError(f'sequence_parallel is {sequence_parallel!r}: it must be True, False or "auto"')
        if async_tensor_parallel and not sequence_parallel:
            raise ValueError(
                "async_tensor_parallel=True overlaps products with the gathers and reduce-scatters of sharded tokens: set"
                " sequence_parallel=True as well"
            )
        keep_whole = (keep_whole,) if isinstance(keep_whole, str) else tuple(keep_whole)
        if plan is not None and (keep_whole or cut):
            raise ValueError("plan= is followed as it is: give keep_whole= and cut= when the plan is made, or edit it")
        return cls(
            tokens=TokensPerStep.given(tokens_per_step),
            keep_whole=keep_whole,
            cut=tuple((cut or {}).items()),
            profile=profile or Profile(),
            plan=plan if isinstance(plan, Plan) or plan is None else Path(plan),
            cache=PlanCache.of(plan_cache),
            sequence_parallel=sequence_parallel,
            async_tensor_parallel=async_tensor_parallel,
        )


def read(file: Path) -> Plan:
    """The plan in a file that ``lightning-autotp plan --json`` wrote.

    Raises:
        ValueError: if there is none.
    """
    try:
        return Plan.from_json(file.read_text())
    except OSError as error:
        raise ValueError(f"plan={str(file)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"plan={str(file)!r}: {error}") from error
