"""Times what a machine does, in processes of its own: products, memory, and collectives between the processes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.meter import Work
from lightning_autotp.planning.rehearsal import rehearse

_ROUNDS = 7
_LONGEST = 5.0
"""Seconds after which calls are not repeated any more: processors without bfloat16 compute it slowly."""
_MEBIBYTES = 2**20
_LAYERS = 4
_TINY = 8
"""Width of what is computed in no time."""
_STRETCH = 20
"""Products after each other between which a collective is measured."""
_WIDTHS = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
"""Of layers whose products are measured, with twice as many rows."""
_SIDES = (32, 64)
"""Of small matrices that are multiplied, many at once."""


class _Products(nn.Module):
    """Products as a training step has them: each of other operands than the one before, with a result that is kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(_LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, width]`` to one number."""
        made: Tensor = self.layers(x).sum()
        return made


class _SmallProducts(nn.Module):
    """Products of many small square matrices at once, as linear attention and chunked recurrences have them."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, width]`` to one number."""
        matrices = x.reshape(-1, self.side, self.side)
        made = matrices
        for _ in range(_LAYERS):
            made = made @ matrices
        return made.sum()


def _attention(x: Tensor) -> Tensor:
    """Causal attention of heads of 64, ``[rows, width]``, in eight sequences."""
    heads = x.view(8, -1, x.shape[1] // 64, 64).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


_OF_THEIR_OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "_scaled_dot_product_flash_attention": _attention,
    "_softmax": lambda x: x.softmax(-1),
    "_log_softmax": lambda x: x.log_softmax(-1),
    "exp": torch.exp,
}
"""Operators that may reach less than products do, or than others do that move as many bytes, with what calls them."""


class _Calling(nn.Module):
    """A module that calls one of these."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, width]`` to one number."""
        return self.call(x).sum()


class _BetweenProducts(nn.Module):
    """What the layers of a transformer compute between products: norms, activations, sums."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(_LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, width]`` to one number."""
        for scale in self.scales:
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale
            x = x + F.silu(normed) * normed
        return x.sum()


def measure(processes: int, device: Literal["auto", "cpu", "cuda"] = "auto") -> Machine:
    """The machine that this program runs on, by what its processes reach together. Starts processes.

    Products count as reached in full, so that no share is taken off a peak. What a network between machines does is not
    measured: its entries are those of the links, for the reader to change.

    Raises:
        ValueError: for fewer than two processes, or more than there are GPUs.
    """
    kind: Literal["cuda", "cpu"] = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    there = torch.cuda.device_count() if kind == "cuda" else processes
    if not 2 <= processes <= there:
        here = f", and {there} GPUs are here" if kind == "cuda" else ""
        raise ValueError(f"{processes} processes cannot be measured: there must be two or more, one for each GPU{here}")
    with tempfile.TemporaryDirectory() as directory:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (processes, kind, directory, results), nprocs=processes)
        figures: dict[str, Any] = results.get()
    memory = (
        torch.cuda.get_device_properties(0).total_memory
        if kind == "cuda"
        else psutil.virtual_memory().total / processes
    )
    return Machine(
        name=torch.cuda.get_device_name(0).replace(" ", "-") if kind == "cuda" else "CPU",
        gpus_per_node=processes,
        memory=float(memory),
        reserved=float(2e9 if kind == "cuda" else 0.5e9),
        reached=1.0,
        network_bandwidth=figures["link_bandwidth"],
        network_latency=figures["latency"],
        host_memory=float(psutil.virtual_memory().total),
        device=kind,
        gpus=processes,
        **figures,
    )


def _rank(rank: int, ranks: int, kind: str, directory: str, results: Any) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(max(1, (psutil.cpu_count(logical=False) or 1) // ranks))
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    try:
        figures = _figures(kind, ranks)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        results.put(figures)


def _figures(kind: str, ranks: int) -> dict[str, Any]:
    """What this process reaches while the others do the same. Collective."""
    width = _WIDTHS[kind][-1]
    module, x = _made(_BetweenProducts(width), width, kind, torch.float32)
    others = _work(module, x).others
    bandwidth = (others.bytes + others.fixed_bytes) / _seconds_of(module, x, kind)
    in_bf16, in_fp32 = _product_rates(kind, torch.bfloat16), _product_rates(kind, torch.float32)
    return {
        "peak_bf16": max(rate for _, rate in in_bf16),
        "peak_fp32": max(rate for _, rate in in_fp32),
        "product_rates_bf16": in_bf16,
        "product_rates_fp32": in_fp32,
        "operator_rates_bf16": _operator_rates(kind, torch.bfloat16, bandwidth),
        "operator_rates_fp32": _operator_rates(kind, torch.float32, bandwidth),
        "memory_bandwidth": bandwidth,
        "operator_overhead": _operator_overhead(kind),
        **_between(kind, ranks),
        **(_host(kind) if kind == "cuda" else {}),
    }


def _product_rates(kind: str, dtype: torch.dtype) -> tuple[tuple[float, float], ...]:
    """What products reach, of rising sizes: operations for each byte that they touch, and operations in a second."""
    rates = []
    small = [(_SmallProducts(side), _WIDTHS[kind][-1]) for side in _SIDES]
    for made, width in (*small, *((_Products(width), width) for width in _WIDTHS[kind])):
        module, x = _made(made, width, kind, dtype)
        work = _work(module, x)
        touched = sum(one.bytes * count for one, count in work.products.items())
        rates.append((work.flops / touched, work.flops / _seconds_of(module, x, kind)))
    return tuple(rates)


def _operator_overhead(kind: str) -> float:
    """Seconds of an operator that has almost nothing to compute, forward and backward, in a model's code."""
    module, x = _made(_BetweenProducts(_TINY), _TINY, kind, torch.float32)
    return _seconds_of(module, x, kind) / len(_work(module, x).ran)


def _operator_rates(kind: str, dtype: torch.dtype, bandwidth: float) -> tuple[tuple[str, float], ...]:
    """What operators reach that have a rate of their own, forward and backward, beside others at this bandwidth."""
    rates: dict[str, float] = {}
    for name, call in _OF_THEIR_OWN.items():
        module, x = _made(_Calling(call), _WIDTHS[kind][-1], kind, dtype)
        ran = _work(module, x).ran
        own = [one for one in ran if one.name.startswith(f"aten.{name}")]
        rest = sum(one.bytes for one in ran if one not in own)
        done = sum(one.bytes if one.flops is None else one.flops for one in own)
        seconds = max(_seconds_of(module, x, kind) - rest / bandwidth, 1e-9)
        rates |= dict.fromkeys((one.name for one in own), done / seconds)
    return tuple(rates.items())


def _between(kind: str, ranks: int) -> dict[str, float]:
    """What the links between the processes reach."""
    part = _large(kind, ranks)
    moved = part.repeat(ranks)
    small = torch.ones(8, device=kind)
    factor = torch.randn(_WIDTHS[kind][1], _WIDTHS[kind][1], device=kind)

    def products_between(collective: Callable[[], Any]) -> float:
        """Of a product and this collective, of several after each other."""

        def step() -> None:
            for _ in range(_STRETCH):
                torch.mm(factor, factor)
                collective()

        return _seconds(step, kind) / _STRETCH

    latency = _seconds(lambda: dist.all_reduce(small), kind)
    gathered = _seconds(lambda: dist.all_gather_into_tensor(moved, part), kind)
    scattered = _seconds(lambda: dist.reduce_scatter_tensor(part, moved), kind)
    reduced = _seconds(lambda: dist.all_reduce(moved), kind)
    # A byte crosses a link once to be gathered and once to be scattered, but for the share that a rank has already.
    sent = (ranks - 1) / ranks * moved.nbytes
    link = 2 * sent / max(gathered + scattered - 2 * latency, 1e-9)
    return {
        "link_bandwidth": link,
        # Ranks that compute are never all ready at once, and wait for each other.
        "latency": max(latency, products_between(lambda: dist.all_reduce(small)) - products_between(lambda: None)),
        "all_reduce_passes": max(reduced - latency, 1e-9) * link / sent,
        "overlap": _overlap(moved, reduced, factor, kind),
    }


def _overlap(sent: Tensor, seconds: float, factor: Tensor, kind: str) -> float:
    """The share of an all-reduce, which takes so many seconds, that is hidden while products take about as long."""
    count = max(1, round(seconds / _seconds(lambda: torch.mm(factor, factor), kind)))

    def compute() -> None:
        for _ in range(count):
            torch.mm(factor, factor)

    def both() -> None:
        sending = dist.all_reduce(sent, async_op=True)
        compute()
        sending.wait()

    computed = _seconds(compute, kind)
    hidden = seconds + computed - _seconds(both, kind)
    return min(1.0, max(0.0, hidden / min(seconds, computed)))


def _large(kind: str, ranks: int) -> Tensor:
    """A rank's part of what is sent."""
    return torch.ones((256 if kind == "cuda" else 8) * _MEBIBYTES // 4 // ranks, device=kind)


def _made(module: nn.Module, width: int, kind: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """A module where it is measured, and its input."""
    return module.to(kind, dtype), torch.randn(2 * width, width, device=kind, dtype=dtype, requires_grad=True)


def _work(module: nn.Module, x: Tensor) -> Work:
    """What a forward and a backward pass do in the dtype that they have, counted as for a plan."""
    return rehearse(module, {"x": x}, precision="32-true", optimizer="none").work  # that is, without autocast


def _host(kind: str) -> dict[str, float]:
    """What the host's memory reaches for all processes together, and what its link to this one's GPU."""
    on_device = _large(kind, 1)
    there, beside = (torch.ones(on_device.shape, pin_memory=True) for _ in range(2))
    copied = 2 * there.nbytes * dist.get_world_size()
    return {
        "host_memory_bandwidth": copied / _seconds(lambda: beside.copy_(there), "cuda"),
        "host_link_bandwidth": there.nbytes / _seconds(lambda: there.copy_(on_device), "cuda"),
    }


def _seconds_of(module: nn.Module, x: Tensor, kind: str) -> float:
    """Of a forward and a backward pass, while all ranks make one. Collective."""

    def step() -> None:
        module.zero_grad()
        module(x).backward()

    return _seconds(step, kind)


def _seconds(call: Callable[[], Any], kind: str) -> float:
    """Median seconds of several calls, fewer of long ones, after a first one; all begin together. Collective.

    The fastest of them would promise what no step reaches, which is made of hundreds.
    """
    found: list[float] = []
    while len(found) <= _ROUNDS and (len(found) < 2 or _spent(found, kind) < _LONGEST):
        dist.barrier()
        _wait(kind)
        began = time.perf_counter()
        call()
        _wait(kind)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def _spent(seconds: Sequence[float], kind: str) -> float:
    """The slowest rank's sum of these. Collective."""
    spent = torch.tensor(sum(seconds), device=kind)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()
