"""Draw the start of a run as a terminal shows it, as an SVG.

python tools/start_picture.py docs/start.svg examples/finetune.py --devices 2 --max-steps 2

The picture has what rank 0 prints from the plan on, up to the first step. Warnings of other libraries are left out.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 110
"""Columns of the script's terminal. The picture is a little wider: a line that fills the terminal would break there."""
BEGIN = "lightning_autotp: planned"
FIRST_STEP = "\x1b[?25l"  # the progress bar hides the cursor
OF_OTHERS = re.compile(r"Warning|warn\(|_pytree\.py")


def output_of(arguments: list[str]) -> str:
    """What a script prints, with its colors."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{arguments} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def start(output: str) -> list[str]:
    """The lines from the plan to the first step.

    Raises:
        ValueError: if no plan was made.
    """
    begin = output.find(BEGIN)
    if begin < 0:
        raise ValueError(f"no line begins with {BEGIN!r}:\n{output}")
    until_step = output[begin:].partition(FIRST_STEP)[0]
    return [line for line in until_step.splitlines() if not OF_OTHERS.search(line)]


def main() -> None:
    """Run the script that was named, and write the picture."""
    picture, *arguments = sys.argv[1:]
    console = Console(record=True, width=WIDTH + 4, file=io.StringIO(), force_terminal=True)
    console.print(f"$ python {' '.join(arguments)}", style="bold", highlight=False)
    for line in start(output_of(arguments)):
        console.print(Text.from_ansi(line.replace(str(Path.home()), "~")))
    console.save_svg(picture, title="Two ranks")


if __name__ == "__main__":
    main()
