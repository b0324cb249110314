"""A run as ``srun`` starts it: one process a task, which knows its rank from SLURM's variables."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from distributed import run_processes
from torch import Tensor
from training import Task, loader, trainer


def started_by_srun(fn: Callable[..., Any], tasks: int, *args: Any) -> list[Any]:
    """What ``fn(*args)`` returns in the tasks of one node, in order of rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return run_processes(_task, tasks, port, fn, args)


def _task(rank: int, tasks: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    # As of a process that nothing else has launched.
    launched = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "TORCHELASTIC", "SLURM_", "NODE_RANK")
    for name in [name for name in os.environ if name.startswith(launched)]:
        del os.environ[name]
    os.environ |= {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": str(tasks), "SLURM_NNODES": "1",
        "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_NODEID": "0", "SLURM_NODELIST": "node0",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    return fn(*args)


class Signalled(Task):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if (self.trainer.global_rank, self.trainer.global_step) == (1, 1):
            os.kill(os.getpid(), signal.SIGUSR1)  # "#SBATCH --signal=SIGUSR1@90", to one task before the others
        return super().training_step(batch, batch_idx)


def requeued(folder: Path) -> int:
    L.seed_everything(3, verbose=False)
    fitting = trainer("autotp", 2, max_steps=4, num_nodes=1, default_root_dir=folder)
    fitting.fit(Signalled("config"), loader())
    return fitting.global_step


def test_a_requeue_signal_saves_on_all_ranks_at_once(tmp_path: Path) -> None:
    assert started_by_srun(requeued, 2, tmp_path) == [4, 4]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["global_step"] == 2
    assert saved["state_dict"]["model.lm_head.weight"].shape == (67, 32)


def trained() -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    task = Task("config")
    fitting = trainer("autotp", 2, max_steps=1, num_nodes=1)
    place = fitting.global_rank, fitting.local_rank, fitting.node_rank, fitting.world_size
    fitting.fit(task, loader())
    strategy: Any = fitting.strategy
    return {
        "place": place,
        "environment": type(strategy.cluster_environment).__name__,
        "rank": dist.get_rank(),
        "group": dist.get_process_group_ranks(strategy.tensor_parallel_group),
        "elements": task.model.lm_head.weight.numel(),
        "losses": task.seen["losses"],
    }


def test_tasks_of_a_job_take_their_ranks_from_slurm() -> None:
    found = started_by_srun(trained, 2)
    L.seed_everything(3, verbose=False)
    task = Task("config")
    trainer("auto", 1, max_steps=1).fit(task, loader())
    assert [seen["place"] for seen in found] == [(0, 0, 0, 2), (1, 1, 0, 2)]
    assert [seen["rank"] for seen in found] == [0, 1]
    assert sum(seen["elements"] for seen in found) == task.model.lm_head.weight.numel()
    for seen in found:
        assert seen["environment"] == "SLURMEnvironment"
        assert seen["group"] == [0, 1]
        assert seen["losses"] == pytest.approx(task.seen["losses"], rel=1e-5)


def test_the_job_script_of_the_examples_is_one() -> None:
    script = Path(__file__).parents[2] / "examples" / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    assert "#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in script.read_text()
