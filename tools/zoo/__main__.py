"""The command: ``make zoo ARGS="..."``, or ``python -m zoo ...`` with ``tools`` on the path."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from jsonargparse import auto_cli
from rich.console import Console

from zoo.models import GROUPS, architectures
from zoo.packages import PACKAGES, entries
from zoo.report import OTHERS_PAGE, from_json, summary, to_json, to_markdown, totals_table
from zoo.run import run
from zoo.verdict import Verdict


def zoo(
    group: str = "all",
    tp: int = 2,
    only: list[str] | None = None,
    json: Path | None = None,
    found: list[Path] | None = None,
    page: Path | None = None,
    plan_only: bool = False,
    limit: float = 120.0,
    sequence_parallel: bool = False,
    device: str = "cpu",
) -> None:
    """Try every architecture of transformers, or models of other packages: tiny, parallelized, against one process.

    Compares a training batch's loss and every full gradient. A run over all groups writes ``docs/zoo.md``, one over
    all other packages ``docs/zoo-others.md``.

    Args:
        group: one of transformers' mappings (causal, seq2seq, masked, image, sequence, token, question, image-text,
            text, ctc, audio, speech, video, series; all of them: all), or a package (torch, diffusers, timm,
            torchvision, x-transformers, litgpt; all of them: others).
        tp: number of tensor-parallel ranks (processes on this machine).
        only: these models only, by their ``model_type`` or their name on the page; the page is written only where
            ``page`` says so.
        json: file to write everything found to, after each model.
        found: files that runs with the same options wrote (``json``), perhaps not to their end: what is in them is not
            run again, and is on the page.
        page: the page to write, instead of the one in ``docs``.
        plan_only: only plan, in one process, and run nothing; writes no page of its own accord either.
        limit: seconds that one architecture may take.
        sequence_parallel: shard the tokens between tensor-parallel regions.
        device: where models are run and compared: "cuda" is the first GPU, which all ranks share.
    """
    console = Console()
    groups = {"all": tuple(GROUPS), "others": tuple(PACKAGES)}.get(group, (group,))
    if not {*groups} <= {*GROUPS, *PACKAGES}:
        known = ", ".join(("all", *GROUPS, "others", *PACKAGES))
        raise SystemExit(f"make zoo: there is no group {group}; --group takes one of {known}")
    chosen = [(g, name) for g in groups for name in _names(g) if only is None or name in only]
    unknown = sorted(set(only or ()) - {name for _, name in chosen})
    if unknown:
        raise SystemExit(
            f"make zoo: {', '.join(unknown)} is in none of the groups ({', '.join(groups)}); "
            "--only takes names such as llama or gpt2, and those of a package with --group"
        )
    options = f"--tp {tp}" + " --plan-only" * plan_only + " --sequence-parallel" * sequence_parallel
    options += f" --device {device}" * (device != "cpu")
    by_model = _found(found or (), options)

    def write() -> None:
        if json is not None:
            json.write_text(to_json([by_model[each] for each in chosen if each in by_model], options))

    write()
    for verdict in run(
        [each for each in chosen if each not in by_model], tp, limit, plan_only, sequence_parallel, device
    ):
        by_model[verdict.group, verdict.name] = verdict
        console.print(summary(verdict), markup=False, highlight=False, soft_wrap=True)
        write()
    verdicts = [by_model[each] for each in chosen]
    console.print(totals_table(verdicts))
    which = f"--group {group}" + f" --only {' '.join(only or ())}" * bool(only)
    command = f'make zoo ARGS="{which} {options}' + f" --page {page}" * (page is not None) + '"'
    if page is None and only is None and not plan_only:
        page = {"all": Path("docs") / "zoo.md", "others": Path("docs") / OTHERS_PAGE}.get(group)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        packages = dict.fromkeys(PACKAGES[g].distribution if g in PACKAGES else "transformers" for g in groups)
        if "transformers" in packages and find_spec("timm"):  # some of its models have a vision tower of timm
            packages["timm"] = None
        page.write_text(to_markdown(verdicts, command, {name: version(name) for name in ("torch", *packages)}))


def _found(files: Iterable[Path], options: str) -> dict[tuple[str, str], Verdict]:
    """The verdicts of earlier runs by group and name."""
    verdicts = []
    for file in files:
        ran_with, of_file = from_json(file.read_text())
        if ran_with != options:
            raise SystemExit(f"make zoo: {file} is of a run with {ran_with}, this one is with {options}")
        verdicts += of_file
    return {(verdict.group, verdict.name): verdict for verdict in verdicts}


def _names(group: str) -> tuple[str, ...]:
    """The models of a group, in its order."""
    if group not in PACKAGES:
        return architectures(group)
    try:
        return tuple(entries(group))
    except ImportError as error:
        raise SystemExit(f"make zoo: {error}; the packages of the zoo are the extra zoo: make zoo ...") from error


def spelled_out(arguments: list[str]) -> list[str]:
    """``--only NAME NAME``, flags without a value and dashes in names, in the parser's own spelling."""
    spelled: list[str] = []
    of: str | None = None
    for argument in arguments:
        if argument.startswith("--"):
            of = argument if argument in ("--only", "--found") else None
            if of:
                continue
        if of:
            spelled.append(f"{of}+={argument}")
        else:
            name, equals, value = argument.partition("=")
            if name.startswith("--"):
                name = "--" + name[2:].replace("-", "_")
            is_flag = argument in ("--plan-only", "--sequence-parallel")
            spelled.append(name + (equals + value if not is_flag else "=true"))
    return spelled


if __name__ == "__main__":
    auto_cli(zoo, args=spelled_out(sys.argv[1:]), prog="make zoo")
