"""``python -m lightning_autotp.zoo plan|run GROUP TP [NAME ...]``: one line per architecture, nothing written."""

from __future__ import annotations

import sys

from lightning_autotp.zoo.models import architectures
from lightning_autotp.zoo.report import summary
from lightning_autotp.zoo.run import run


def main() -> None:
    """Entry point."""
    mode, group, ranks, *names = sys.argv[1:]
    jobs = [(group, name) for name in names or architectures(group)]
    for verdict in run(jobs, int(ranks), limit=60.0, plan_only=mode == "plan"):
        print(summary(verdict), flush=True)


if __name__ == "__main__":
    main()
