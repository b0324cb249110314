"""Machines as data: one YAML file each, of figures with their sources; prices of a plan are read from the same ones."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import yaml

from lightning_autotp.solving.cost import Profile

DIRECTORY = Path(__file__).parent / "machine_files"
_RATES = {"product_rates_bf16", "product_rates_fp32"}
_NAMED_RATES = {"operator_rates_bf16", "operator_rates_fp32"}
_OF_HOST = {"host_memory", "host_memory_bandwidth", "host_link_bandwidth", "operator_overhead"}
_OPTIONAL = {"gpus", "device", *_OF_HOST, *_RATES, *_NAMED_RATES}


@dataclass(frozen=True)
class Machine:
    """GPUs of one type in nodes.

    Attributes:
        name: of the GPU.
        gpus_per_node: GPUs that share the fast links.
        memory: bytes of a GPU.
        reserved: bytes of it that are no tensor's: context, communication buffers, workspaces.
        peak_bf16: dense floating-point operations per second in bfloat16.
        peak_fp32: likewise in float32.
        reached: the share of a peak that products of training reach, where no rates of theirs are given.
        memory_bandwidth: bytes per second.
        link_bandwidth: bytes per second and direction between GPUs of a node.
        latency: seconds of a small collective in a node.
        all_reduce_passes: how often an all-reduced byte crosses a link of a node (1 in a switch, 2 in a ring).
        overlap: the share of a collective's time in a node that is hidden while the same GPU computes. The rest is by
            what each slows down the other. Collectives between nodes are taken to slow down nothing.
        network_bandwidth: bytes per second and direction of each GPU to other nodes.
        network_latency: seconds of a small collective between nodes.
        host_memory: bytes of a node's own memory; ``None`` where it is not known, as the next ones.
        host_memory_bandwidth: bytes per second of it.
        host_link_bandwidth: bytes per second and direction between a GPU and it, while all GPUs of a node copy.
        product_rates_bf16: what products reach in bfloat16, in pairs, rising: of so many operations for each byte that
            they read and write, so many a second. Empty where it was not measured.
        product_rates_fp32: likewise in float32.
        operator_rates_bf16: what some operators reach in bfloat16, by name, where it is not what others do: so many
            bytes a second, and attention so many operations. Empty where it was not measured.
        operator_rates_fp32: likewise in float32.
        operator_overhead: seconds that Python and PyTorch take for an operator besides what it computes; ``None`` where
            it was not measured. A GPU computes meanwhile.
        device: ``cuda`` or ``cpu``.
        gpus: how many there are.
    """

    name: str
    gpus_per_node: int
    memory: float
    reserved: float
    peak_bf16: float
    peak_fp32: float
    reached: float
    memory_bandwidth: float
    link_bandwidth: float
    latency: float
    all_reduce_passes: float
    overlap: float
    network_bandwidth: float
    network_latency: float
    host_memory: float | None = None
    host_memory_bandwidth: float | None = None
    host_link_bandwidth: float | None = None
    product_rates_bf16: tuple[tuple[float, float], ...] = ()
    product_rates_fp32: tuple[tuple[float, float], ...] = ()
    operator_rates_bf16: tuple[tuple[str, float], ...] = ()
    operator_rates_fp32: tuple[tuple[str, float], ...] = ()
    operator_overhead: float | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: int = 0

    @classmethod
    def read(cls, file: Path) -> Machine:
        """The machine that a YAML file describes.

        Raises:
            ValueError: naming what is missing, unknown or no positive number.
        """
        try:
            data = yaml.safe_load(file.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"the machine {str(file)!r} cannot be read: {error}") from error
        given = set(data) if isinstance(data, dict) else set()
        known = {field.name for field in fields(cls)}
        wrong = [f"{key} is missing" for key in sorted(known - given - _OPTIONAL)]
        wrong += [f"{key} is no entry" for key in sorted(map(str, given - known))]
        if wrong:
            raise ValueError(f"the machine {str(file)!r} has other entries than needed: {', '.join(wrong)}")
        if (device := data.get("device", "cuda")) not in ("cuda", "cpu"):
            raise ValueError(f"the machine {str(file)!r}: device must be cuda or cpu, not {device!r}")
        others = {"name", "device", "overlap", *_RATES, *_NAMED_RATES}
        may_be_none = {key for key, value in data.items() if key in _OPTIONAL and value is None}
        wrong = [key for key in data.keys() - others - may_be_none if not _is_positive(data[key])]
        if wrong:
            raise ValueError(
                f"the machine {str(file)!r}: {', '.join(sorted(wrong))} must be positive numbers, as 3.0e+9"
            )
        if wrong := [key for key in ("gpus_per_node", "gpus") if not isinstance(data.get(key, 1), int | None)]:
            raise ValueError(f"the machine {str(file)!r}: {', '.join(wrong)} must be whole numbers")
        if data["reached"] > 1 or data["reserved"] >= data["memory"]:
            raise ValueError(f"the machine {str(file)!r}: reached must be at most 1, and reserved less than memory")
        if not (data["overlap"] == 0 or _is_positive(data["overlap"])) or data["overlap"] > 1:
            raise ValueError(f"the machine {str(file)!r}: overlap must be from 0 to 1")
        rates = {key: data[key] for key in sorted(_RATES & given)}
        if wrong := [key for key, value in rates.items() if not _are_rates(value)]:
            raise ValueError(
                f"the machine {str(file)!r}: {', '.join(wrong)} must be pairs of positive numbers, of which the first"
                " ones rise, as [[50.0, 1.0e+14], [200.0, 3.0e+14]]"
            )
        named = {key: data[key] for key in sorted(_NAMED_RATES & given)}
        if wrong := [key for key, value in named.items() if not _are_named_rates(value)]:
            raise ValueError(
                f"the machine {str(file)!r}: {', '.join(wrong)} must give positive numbers by names of operators, as"
                " {aten._softmax: 1.0e+9}"
            )
        pairs = {key: tuple(map(tuple, value)) for key, value in rates.items()}
        found = cls(**data | pairs | {key: tuple(value.items()) for key, value in named.items()})
        return replace(found, gpus=found.gpus or found.gpus_per_node)

    @classmethod
    def of(cls, gpus: str) -> Machine:
        """So many GPUs of a machine: ``"16xH100"``, or ``"4xmy_machine.yaml"``; without a number, one node.

        Raises:
            ValueError: for a machine that is not known.
        """
        found = re.fullmatch(r"(?:(\d+)\s*[xX]\s*)?(.+)", gpus.strip())
        count, name = (found[1], found[2]) if found else (None, gpus)
        machines = known_machines()
        file = Path(name) if name.endswith((".yaml", ".yml")) else machines.get(name.upper())
        if file is None or (count is not None and int(count) < 1):
            raise ValueError(
                f"gpus={gpus!r}: write how many of which, as 8xH100; known are {', '.join(machines)}; of any other"
                " machine, the file that `lightning-autotp measure-machine` wrote: 8xmy_machine.yaml"
            )
        machine = cls.read(file)
        return replace(machine, gpus=int(count)) if count is not None else machine

    def write(self, file: Path) -> None:
        """Write the file that :meth:`read` reads."""
        known = {key: value for key, value in asdict(self).items() if value not in (None, ())}
        for key in _RATES & known.keys():
            known[key] = [list(pair) for pair in known[key]]
        for key in _NAMED_RATES & known.keys():
            known[key] = dict(known[key])
        file.write_text(yaml.safe_dump(known, sort_keys=False))

    @property
    def free(self) -> float:
        """Bytes of a GPU that tensors may take."""
        return self.memory - self.reserved

    @property
    def profile(self) -> Profile:
        """Prices for planning on it, within a node."""
        return Profile(
            flops=self.peak_bf16 * self.reached,
            memory_bandwidth=self.memory_bandwidth,
            link_bandwidth=self.link_bandwidth,
            latency=self.latency,
            all_reduce_passes=self.all_reduce_passes,
        )

    def between(self, ranks: int) -> Profile:
        """Prices of collectives between ranks of which not all are in one node."""
        if ranks <= self.gpus_per_node:
            return self.profile
        return replace(
            self.profile,
            link_bandwidth=self.network_bandwidth,
            latency=self.network_latency,
            all_reduce_passes=2.0,
        )

    def exposed(self, ranks: int, sent: float, computed: float) -> float:
        """What of so many seconds of collectives between ranks does not hide behind so many of computing."""
        overlap = self.overlap if ranks <= self.gpus_per_node else 1.0
        return sent - overlap * min(sent, computed)

    @property
    def unknown_of_host(self) -> list[str]:
        """What must be known to say how long it takes to keep something in host memory, and is not."""
        return [key for key in ("host_link_bandwidth", "host_memory_bandwidth") if getattr(self, key) is None]

    def peak(self, in_bf16: bool) -> float:
        """Floating-point operations per second of a GPU, in bfloat16 or float32."""
        return self.peak_bf16 if in_bf16 else self.peak_fp32

    def product_rate(self, intensity: float, in_bf16: bool) -> float:
        """What a product reaches that has so many floating-point operations for each byte that it touches."""
        rates = self.product_rates_bf16 if in_bf16 else self.product_rates_fp32
        if not rates:
            return self.peak(in_bf16) * self.reached
        intensities, reached = zip(*rates, strict=True)
        return float(np.interp(intensity, intensities, reached))

    def operator_rate(self, name: str, in_bf16: bool) -> float | None:
        """What this operator reaches, where that was measured: bytes per second, or operations if it is a product."""
        return self._operator_rates[in_bf16].get(name)

    @cached_property
    def _operator_rates(self) -> dict[bool, dict[str, float]]:
        return {True: dict(self.operator_rates_bf16), False: dict(self.operator_rates_fp32)}


def machine_called(name: str) -> Machine | None:
    """One node of the GPUs that a device is called by (``"NVIDIA H100 80GB HBM3"``), if they are known."""
    known = next((machine for machine in known_machines() if machine in name.upper()), None)
    return None if known is None else Machine.of(known)


def known_machines() -> dict[str, Path]:
    """The files of the machines that come with the package, by the name of their GPUs."""
    return {file.stem.upper(): file for file in sorted(DIRECTORY.glob("*.yaml"))}


def _are_rates(value: object) -> bool:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return False
    firsts = [pair[0] for pair in value]
    return all(_is_positive(number) for pair in value for number in pair) and firsts == sorted(set(firsts))


def _are_named_rates(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) and _is_positive(rate) for name, rate in value.items())


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
