"""Plans that were made before, as files: the second start of a large model need not plan again.

A plan is found by what decides on it (:mod:`~lightning_autotp.capture.fingerprint`, the settings and this package's own
code). It is proved against the model like any other, so a stale one costs time and never a wrong result.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from functools import cache
from pathlib import Path
from uuid import uuid4

from lightning_autotp.layouts.plan import Plan

VARIABLE = "LIGHTNING_AUTOTP_PLANS"
"""The environment variable that names the directory; empty: no plan is kept."""


class PlanCache:
    """A directory of plans.

    Args:
        directory: where they are; ``None``: nowhere, nothing is kept.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    @classmethod
    def of(cls, setting: bool | str | os.PathLike[str]) -> PlanCache:
        """The cache that a user's setting means.

        Args:
            setting: a directory; ``False`` for none; ``True`` for the one that ``LIGHTNING_AUTOTP_PLANS`` names, or
                ``lightning_autotp/plans`` in the user's cache directory.
        """
        if setting is False:
            return cls(None)
        if setting is not True:
            return cls(Path(setting))
        named = os.environ.get(VARIABLE)
        if named is not None:
            return cls(Path(named) if named else None)
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return cls(Path(base) / "lightning_autotp" / "plans")

    def find(self, key: str) -> Plan | None:
        """The plan that was kept under this key, if there is one that can be read."""
        try:
            return Plan.from_json(self._file(key).read_text()) if self.directory is not None else None
        except (OSError, ValueError):
            return None

    def keep(self, key: str, plan: Plan) -> None:
        """Keep a plan. Where that cannot be done there is a warning, and the next start plans again."""
        if self.directory is None:
            return
        file = self._file(key)
        unfinished = file.with_suffix(f".{uuid4().hex}")  # process ids are those of one machine
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_text(plan.to_json())
                unfinished.replace(file)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(
                f"the plan is not kept for the next start ({error}): name a directory that can be written to, with"
                f" plan_cache= or {VARIABLE}, or switch it off with plan_cache=False",
                stacklevel=2,
            )

    def _file(self, key: str) -> Path:
        assert self.directory is not None
        return self.directory / f"{key}-{planner_digest()}.json"


@cache
def planner_digest() -> str:
    """A short hash of this package's code."""
    sources = hashlib.sha256()
    for file in sorted(Path(__file__).parent.parent.rglob("*.py")):
        sources.update(file.read_bytes())
    return sources.hexdigest()[:12]
