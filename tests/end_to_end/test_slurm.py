"""A run as ``srun`` starts it: one process a task, which knows its rank from SLURM's variables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from distributed import PATIENCE, SCRIPT_ENVIRONMENT
from training import Task, loader, trainer

SCRIPT = """
import json, sys
import lightning as L
import torch.distributed as dist
import lightning_autotp
from training import Task, loader, trainer

L.seed_everything(3, verbose=False)
task = Task("config")
fitting = trainer("autotp", 2, max_steps=1, num_nodes=1)
place = fitting.global_rank, fitting.local_rank, fitting.node_rank, fitting.world_size
fitting.fit(task, loader())
strategy = fitting.strategy
print("FOUND", json.dumps({
    "place": place,
    "environment": type(strategy.cluster_environment).__name__,
    "rank": dist.get_rank(),
    "group": dist.get_process_group_ranks(strategy.tensor_parallel_group),
    "elements": task.model.lm_head.weight.numel(),
    "losses": task.seen["losses"],
}))
"""


def started_by_srun(script: Path, tasks: int) -> list[dict[str, Any]]:
    """What the tasks of one node print after ``FOUND``, in order of rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # As of a process that nothing else has launched.
    launched = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "TORCHELASTIC", "SLURM_", "NODE_RANK")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    job = {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": str(tasks), "SLURM_NNODES": "1",
        "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_NODEID": "0", "SLURM_NODELIST": "node0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**clean, **SCRIPT_ENVIRONMENT, **job, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in range(tasks)
    ]
    try:
        done = [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, done, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.split("FOUND")[1]) for output, _ in done]


REQUEUED = """
import json, os, signal, sys
import lightning as L
import torch
from training import Task, loader, trainer

class Signalled(Task):
    def training_step(self, batch, batch_idx):
        if (self.trainer.global_rank, self.trainer.global_step) == (1, 1):
            os.kill(os.getpid(), signal.SIGUSR1)  # "#SBATCH --signal=SIGUSR1@90", to one task before the others
        return super().training_step(batch, batch_idx)

L.seed_everything(3, verbose=False)
fitting = trainer("autotp", 2, max_steps=4, num_nodes=1, default_root_dir=os.path.dirname(__file__))
fitting.fit(Signalled("config"), loader())
print("FOUND", json.dumps({"steps": fitting.global_step}))
"""


def test_a_requeue_signal_saves_on_all_ranks_at_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(REQUEUED)
    assert started_by_srun(script, 2) == [{"steps": 4}, {"steps": 4}]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["global_step"] == 2
    assert saved["state_dict"]["model.lm_head.weight"].shape == (67, 32)


def test_tasks_of_a_job_take_their_ranks_from_slurm(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = started_by_srun(script, 2)
    L.seed_everything(3, verbose=False)
    task = Task("config")
    trainer("auto", 1, max_steps=1).fit(task, loader())
    assert [seen["place"] for seen in found] == [[0, 0, 0, 2], [1, 1, 0, 2]]
    assert [seen["rank"] for seen in found] == [0, 1]
    assert sum(seen["elements"] for seen in found) == task.model.lm_head.weight.numel()
    for seen in found:
        assert seen["environment"] == "SLURMEnvironment"
        assert seen["group"] == [0, 1]
        assert seen["losses"] == pytest.approx(task.seen["losses"], rel=1e-5)
