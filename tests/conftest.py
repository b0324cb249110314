"""Settings of every test: of the property tests, and that no plan comes from another file's tests or an earlier run.

No limit is in seconds: how long an example takes says how busy the machine is. Examples are the same in every run, so
that a test that fails fails again.
"""

from __future__ import annotations

import gc
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port for the scripts that a test starts, outside the range that connections are given theirs from.

    Lightning would take one of that range, and a connection of another test might have it until rank 0 opens it.
    """
    with socket.socket() as probe:
        while True:
            chosen = random.SystemRandom().randrange(15000, 32000)
            try:
                probe.bind(("", chosen))
            except OSError:
                continue
            break
    monkeypatch.setenv("STANDALONE_PORT", str(chosen))


@pytest.fixture(autouse=True)
def counted_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a weak reference to memory is an error: torch does not count it, and memory would be freed twice.

    Fake tensors refer to such references, so a copy that takes a fake tensor along without need ends here.
    """
    # Here, not above: what hands the tests out to other processes needs no torch, and they wait for it.
    from torch.multiprocessing.reductions import StorageWeakRef

    def refuse(reference: StorageWeakRef, _: object) -> None:
        raise AssertionError(f"{reference} is copied, though torch does not count copies")

    monkeypatch.setattr(StorageWeakRef, "__deepcopy__", refuse, raising=False)
    monkeypatch.setattr(StorageWeakRef, "__reduce_ex__", refuse)


def pytest_collection_finish() -> None:
    """What was imported stays: it is not looked at each time that objects are looked for that do not, nor often."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: one that began last would leave the other processes without work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True, scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A file's tests keep the plans that their ranks make: one is proved each time that it is used, and made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_AUTOTP_PLANS", str(tmp_path_factory.mktemp("plans")))
        yield


@pytest.fixture(autouse=True, scope="module")
def declared_here() -> Iterator[None]:
    """What a file's tests declare is forgotten after them: plans of other tests follow from it, and their cache."""
    from lightning_autotp.operators import declared, registry

    tables: list[Any] = [declared._DECLARED, declared._TARGETS, declared._TO_FIND, registry._DECLARED]
    before = [table.copy() for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)
