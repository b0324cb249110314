"""Time a training step of this project beside its peers, and write the page.

python benchmarks/compare.py                           # everything, and docs/benchmarks.md
python benchmarks/compare.py --rounds 5 --page null    # a quick look
"""

from __future__ import annotations

from pathlib import Path

from jsonargparse import auto_cli
from peers.cases import CASES, TINY
from peers.report import picture, print_table, to_markdown
from peers.run import measure

DOCS = Path(__file__).parent.parent / "docs"


def main(
    ranks: int = 2,
    rounds: int = 15,
    case: list[str] | None = None,
    system: list[str] | None = None,
    page: Path | None = DOCS / "benchmarks.md",
    tiny: bool = False,
) -> None:
    """Compare training steps.

    Args:
        ranks: processes, on as many GPUs, or else on the processor.
        rounds: steps of each system that are timed, in turn.
        case: names of the models, or parts of them; all by default.
        system: names of the systems; all by default. One process is always there.
        page: where to write the page, with its picture beside it; ``null`` to print only.
        tiny: run a tiny model instead, to see that everything runs.
    """
    found = {}
    for name in [TINY] if tiny else [name for name in CASES if name != TINY]:
        if case is None or any(part in name for part in case):
            found[name] = measure(name, ranks, rounds, system or ())
            print_table(name, found[name])
    if page is not None:
        image = page.with_suffix(".png")
        picture(found, image)
        page.write_text(to_markdown(found, ranks, rounds, image.name))


if __name__ == "__main__":
    auto_cli(main)
