"""A model read from files on a rank."""

from __future__ import annotations

import subprocess
import sys

from deferred_models import ENV
from distributed import PATIENCE, SUPPORT


def run(script: str, *arguments: object) -> list[int]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=SUPPORT, env=ENV)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]
