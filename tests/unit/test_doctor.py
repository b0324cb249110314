"""``lightning-autotp doctor``: what each check says of a machine, and two processes that do not meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from packaging.requirements import Requirement

from lightning_autotp import doctor
from lightning_autotp.doctor import CHECKS, Device, Facts

GIB = 2**30
H100 = Device("H100", 80 * GIB, (9, 0), frozenset({0, 1}))
GOOD = Facts(
    requirements=tuple(map(Requirement, ("torch>=2.13.0", "lightning>=2.6", "transformers>=5.17"))),
    versions={"torch": "2.13.0+cu130", "lightning": "2.6.6", "transformers": "5.17.0"},
    cuda_build="13.0",
    has_driver=True,
    devices=(H100, H100),
    backends=frozenset({"gloo", "nccl"}),
    handshakes={"gloo": None, "nccl": None},
    shared_memory=8 * GIB,
    host="node0",
    addresses=frozenset({"10.0.0.1"}),
    disks={"the Hub's cache": 500 * GIB, "this directory": 90 * GIB},
    open_files=65536,
    omp_threads="8",
    cores=16,
)
T4 = replace(H100, name="T4", capability=(7, 5))
OTHERS: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "versions",
        "error",
        {"versions": {**GOOD.versions, "torch": "2.12.1"}},
        "torch>=2.13.0 is needed, 2.12.1 is installed",
    ),
    (
        "versions",
        "error",
        {"versions": {**GOOD.versions, "lightning": None}},
        "lightning>=2.6 is needed, none is installed",
    ),
    ("devices", "warning", {"devices": (), "has_driver": False}, "no GPU"),
    ("devices", "error", {"devices": ()}, "torch for CUDA 13.0 sees no GPU"),
    ("devices", "error", {"devices": (), "cuda_build": None}, "built without CUDA"),
    ("devices", "warning", {"devices": (H100, T4)}, "waits for the slowest"),
    ("devices", "warning", {"devices": (T4, T4)}, "no bfloat16"),
    ("links", "warning", {"devices": (H100, replace(H100, reaches=frozenset()))}, "GPU 1 does not reach GPU 0"),
    ("backends", "error", {"backends": frozenset({"gloo"})}, "no nccl"),
    (
        "handshake",
        "error",
        {"handshakes": {"gloo": None, "nccl": "unhandled system error"}},
        "nccl (unhandled system error)",
    ),
    ("shared memory", "warning", {"shared_memory": 64 * 2**20}, "0.06 GiB"),
    ("host name", "warning", {"addresses": frozenset()}, "node0 resolves to no address"),
    ("disk", "warning", {"disks": {"the Hub's cache": 3 * GIB}}, "the Hub's cache 3 GiB free"),
    ("open files", "warning", {"open_files": 1024}, "ulimit -n"),
    ("threads", "warning", {"omp_threads": "32"}, "OMP_NUM_THREADS=32 on 16 cores"),
    ("threads", "warning", {"omp_threads": "many"}, "OMP_NUM_THREADS=many"),
]


def test_nothing_is_said_against_a_good_machine() -> None:
    findings = [check(GOOD) for check in CHECKS]
    assert [finding.level for finding in findings] == ["ok"] * len(CHECKS)
    assert {finding.check for finding in findings} == {check for check, *_ in OTHERS}
    assert "2 x H100 (80 GiB, capability 9.0)" in str(findings[1])


@pytest.mark.parametrize(("name", "level", "changes", "said"), OTHERS)
def test_each_check_sees_its_own_fault_alone(name: str, level: str, changes: dict[str, Any], said: str) -> None:
    findings = {(finding := check(replace(GOOD, **changes))).check: finding for check in CHECKS}
    assert findings[name].level == level
    assert said in findings[name].text
    assert not [other.text for other in findings.values() if other.check != name and other.level != "ok"]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys, time; sys.exit('no route' if sys.argv[2] == '1' else time.sleep(60))", "no route"),
        ("while True: pass", "no answer in 1 s"),
    ],
)
def test_processes_that_do_not_meet_are_said_and_ended(
    program: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_HANDSHAKE", program)
    monkeypatch.setattr(doctor, "HANDSHAKE_SECONDS", 1)
    assert doctor._handshake("gloo") == said
