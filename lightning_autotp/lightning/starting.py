"""Before processes are started: whether they can be, and what to write instead where not.

Lightning starts the other processes of a machine by running the program's file again, and takes itself for the first
machine of several where nothing says otherwise. Without a file the others end at once; without an address the first
machine waits for others that never come.
"""

from __future__ import annotations

import os
import sys

ADDRESS = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What tells one machine of several which one it is, and where the first one is."""


def check_start(processes: int, machines: int) -> None:
    """Check that this process can start the others of its machine, and that all machines find each other.

    Args:
        processes: on this machine.
        machines: all.

    Raises:
        RuntimeError: if either cannot be.
    """
    if processes > 1 and not _has_program():
        raise RuntimeError(
            f'strategy="autotp" with {processes} processes starts the others by running the program\'s file again, and'
            " there is none (a notebook, an interactive interpreter, python -c). Write the program to a file, train.py,"
            f" and run `python train.py` or `torchrun --nproc-per-node {processes} train.py`; a notebook does so with"
            " `%%writefile train.py` above a cell, and `!python train.py`. devices=1 runs here"
        )
    missing = [name for name in ADDRESS if name not in os.environ and not _has_another(name)]
    if machines > 1 and missing:
        raise RuntimeError(
            f"num_nodes={machines}: {', '.join(missing)} not set, so this process does not know which of the"
            f" {machines} machines it is on, or where the first one is, and would wait for the others forever. Start"
            f" the program on every machine with `torchrun --nnodes {machines} --nproc-per-node {processes}"
            " --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 train.py`, or in a SLURM job with srun; or set"
            " them: MASTER_ADDR and MASTER_PORT of the first machine everywhere, NODE_RANK from 0 on. On one machine,"
            " leave num_nodes out"
        )


def _has_program() -> bool:
    if hasattr(sys, "ps1"):
        return False
    return getattr(sys.modules["__main__"], "__spec__", None) is not None or os.path.isfile(sys.argv[0])


def _has_another(name: str) -> bool:
    return name == "NODE_RANK" and "GROUP_RANK" in os.environ
