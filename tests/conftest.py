"""Settings of every test: of the property tests, and that no plan comes from an earlier run.

No limit is in seconds: how long an example takes says how busy the machine is. Examples are the same in every run, so
that a test that fails fails again.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

os.environ["LIGHTNING_AUTOTP_PLANS"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: one that began last would leave the other processes without work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
