"""The verdicts as a table on the terminal, as ``docs/zoo.md`` and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.table import Table

from zoo.packages import PACKAGES
from zoo.verdict import Left, Verdict

GOAL = 0.9
"""Share of the parameters that is to be sharded."""

COUNTED_GOAL = 0.95
"""Share of the counted FLOPs that is to be divided."""

GROUP_TITLES = {
    "causal": "Causal language models",
    "seq2seq": "Sequence-to-sequence models",
    "masked": "Masked language models",
    "image": "Image classifiers",
    "sequence": "Sequence classifiers",
    "token": "Token classifiers",
    "question": "Question answering",
    "image-text": "Pictures and text",
    "text": "Text encoders",
    "ctc": "Speech recognition (CTC)",
    "audio": "Audio classifiers",
    "speech": "Speech to text",
    "video": "Video classifiers",
    "series": "Time series",
    **{group: package.title for group, package in PACKAGES.items()},
}
OTHERS_PAGE = "zoo-others.md"
_COLUMNS = ("architecture", "parity", "sharded", "FLOPs", "counted", "all-reduces", "what stays whole, and why")
_SUBJECTS = {
    False: "Every architecture that transformers can train, built small (hidden size 64, layers of every kind it has,"
    " nothing random in it), planned,",
    True: "Models of other packages than transformers, built small (hidden size 64 where they have one, nothing random"
    " in them), planned,",
}
_OTHER_PAGE = {
    False: f"Models of other packages (diffusers, timm, ...) are on [a page of their own]({OTHERS_PAGE}).",
    True: "The architectures of transformers are on [a page of their own](zoo.md).",
}
_MOST_REASONS = 2
_LONGEST_REASON = 220


def totals(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Counts over some verdicts."""
    tried = [verdict for verdict in verdicts if verdict.outcome != "left out"]
    return {
        "architectures": len(verdicts),
        "train on one process": len(tried),
        "planned": sum(verdict.outcome not in ("error",) for verdict in tried),
        "parity": sum(verdict.is_parity for verdict in tried),
        "parity and 90 % sharded": sum(verdict.is_parity and verdict.sharded >= GOAL for verdict in tried),
        "wrong": sum(verdict.outcome == "wrong" for verdict in tried),
        "errors": sum(verdict.outcome == "error" for verdict in tried),
    }


def summary(verdict: Verdict) -> str:
    """One line, as soon as an architecture is done."""
    why = [_shortened(verdict.reason)] if verdict.reason else []
    why += [f"{left.share:.1%} whole: {left.example}: {_shortened(left.reason)}" for left in verdict.left[:1]]
    if not verdict.parameters:
        return f"{verdict.name:26} {verdict.outcome:8} {'; '.join(why)}".rstrip()
    counted = f" ({verdict.counted:.0%} counted)" if verdict.counted else ""
    numbers = (
        f"{verdict.sharded:6.1%} sharded, {verdict.flops:4.0%} of the FLOPs{counted}, {verdict.all_reduces:.1f}"
        f" all-reduces per layer, planned in {verdict.seconds:4.1f} s"
    )
    errors = f", loss {verdict.loss_error:.0e}, gradient {verdict.gradient_error:.0e}" if verdict.is_parity else ""
    errors += " in fp64" * (verdict.is_parity and verdict.precision == 64)
    return f"{verdict.name:26} {verdict.outcome:8} {numbers}{errors}; {'; '.join(why)}".rstrip("; ")


def totals_table(verdicts: Sequence[Verdict]) -> Table:
    """The counts of every group, for rich to print."""
    table = Table("", *totals([]))
    for group, counts in _by_group(verdicts).items():
        table.add_row(GROUP_TITLES[group], *map(str, counts.values()))
    return table


def _by_group(verdicts: Sequence[Verdict]) -> dict[str, dict[str, int]]:
    """The counts of every group."""
    groups = dict.fromkeys(verdict.group for verdict in verdicts)
    return {group: totals([verdict for verdict in verdicts if verdict.group == group]) for group in groups}


def to_json(verdicts: Sequence[Verdict], options: str) -> str:
    """Everything that a run with these options found, as JSON text."""
    data = {
        "options": options,
        "totals": _by_group(verdicts),
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    return json.dumps(data, indent=1)


def from_json(text: str) -> tuple[str, list[Verdict]]:
    """The options and the verdicts of a run."""
    data = json.loads(text)
    verdicts = [Verdict(**{**each, "left": [Left(**left) for left in each["left"]]}) for each in data["verdicts"]]
    return data["options"], verdicts


def to_markdown(verdicts: Sequence[Verdict], command: str, versions: Mapping[str, str]) -> str:
    """A page of ``docs/``: totals first, then a table per group. The same verdicts always give the same page."""
    groups = list(dict.fromkeys(verdict.group for verdict in verdicts))
    is_of_packages = any(group in PACKAGES for group in groups)
    made_with = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        "# The zoo",
        "",
        f"Made by `{command}` with {made_with}; do not edit.",
        "",
        f"{_SUBJECTS[is_of_packages]} split over the ranks and given one training batch. There is no line about any"
        " of them in the package: only sizes and inputs are listed, for this page. A plan is priced as a"
        " user's is, for a step of 16,384 tokens, and as if the model were 4,096 wide: products take 64 times as long.",
        "",
        _OTHER_PAGE[is_of_packages],
        "",
        "*Parity* means that the loss and every element of every gradient, put together from the ranks, are those"
        " of the same model on one process; so are, after a step of gradient descent, the loss of a second step,"
        " the one in eval mode, and every buffer. In fp32 a loss may differ by 1e-5 of its value, a gradient or a"
        " buffer by 1e-4 of the largest element of its tensor; differences below 1e-7 of the model's largest"
        " gradient are rounding (the gradient of a key bias under a softmax is zero but for it). Where fp32 cannot"
        " tell, because rounding itself is larger (batch normalization over a few small pictures) or nothing is"
        " above it, both are computed in fp64 and may differ by 1e-9 and 1e-8: `yes (fp64)`; what a model computes"
        " in fp32 whatever its weights are may differ as in fp32, in both. *Wrong* would be a model that trains,"
        " but not the same; *error* one that is refused or cannot be planned, with the message.",
        "",
        "| | " + " | ".join(totals([])) + " |",
        "| --- |" + " ---: |" * len(totals([])),
        *(
            f"| {GROUP_TITLES[group]} | " + " | ".join(map(str, counts.values())) + " |"
            for group, counts in _by_group(verdicts).items()
        ),
        "",
        "- *sharded*: how much of the parameters (embeddings included) each rank holds only a part of. In brackets, how"
        " much of them this batch does not train.",
        "- *FLOPs*: how much of the matrix products in the layers the ranks divide among them. The rest every rank"
        " computes whole. By the plan, forward only.",
        "- *counted*: how much of all FLOPs of a forward and backward, the head's included, they divide, as torch's"
        " counter sees it on the ranks.",
        "- *all-reduces*: how often, per layer and forward, the ranks add up results, *of* the fewest known for such a"
        " layer whose products are all divided: one for each part that ends in a row-parallel product, one for parts"
        " side by side, and one for what a part needs of all ranks on its way (the statistic of a norm over all heads,"
        " the latents of latent attention, the step sizes of a state space). After `+`, gathers and scatters. Counted"
        " are those in the layers, and not what is done to embeddings before the first one.",
        "- *what stays whole, and why*: the share of the parameters, one of them, and the operator and source line that"
        " need all of it.",
        *(
            f"- Calls of {verdict.name} in eval mode are refused: {_shortened(verdict.no_eval)}"
            for verdict in verdicts
            if verdict.no_eval
        ),
    ]
    for group in groups:
        lines += ["", f"## {GROUP_TITLES[group]}", "", *_divided(verdicts, group), "| " + " | ".join(_COLUMNS) + " |"]
        lines.append("| --- | --- | ---: | ---: | ---: | ---: | --- |")
        for verdict in verdicts:
            if verdict.group == group:
                lines.append("| " + " | ".join(map(_as_text, _row(verdict))) + " |")
    return "\n".join(lines) + "\n"


def _divided(verdicts: Sequence[Verdict], group: str) -> list[str]:
    """How many of a group divide nearly all FLOPs, and communicate no more than they must; nothing if none was run."""
    run = [verdict for verdict in verdicts if verdict.group == group and verdict.counted]
    if not run:
        return []
    divide = sum(verdict.counted >= COUNTED_GOAL for verdict in run)
    text = f"Of {len(run)}, {divide} divide at least {COUNTED_GOAL:.0%} of the counted FLOPs"
    if known := sum(verdict.least > 0 for verdict in run):
        fewest = sum(verdict.has_fewest_collectives for verdict in run)
        text += f"; {fewest}" + f" of {known}" * (known < len(run))
        text += " have the fewest all-reduces known, and no gathers"
    return [f"{text}.", ""]


def _as_text(cell: str) -> str:
    """A cell of which Markdown makes no columns and no links: reasons show code."""
    return cell.replace("|", "\\|").replace("](", "]\\(")


def _row(verdict: Verdict) -> tuple[str, ...]:
    if verdict.outcome == "left out":
        return verdict.name, "left out", "", "", "", "", verdict.reason
    if not verdict.parameters:
        return verdict.name, verdict.outcome, "", "", "", "", _shortened(verdict.reason)
    unused = f" ({verdict.unused:.0%})" if verdict.unused >= 0.005 else ""
    others = f" + {verdict.other_collectives:.1f}" if verdict.other_collectives else ""
    reasons = [_shortened(verdict.reason)] if verdict.reason else []
    for left in verdict.left[:_MOST_REASONS]:
        reasons.append(f"{left.share:.1%} `{left.example}`: {_shortened(left.reason)}")
    if len(verdict.left) > _MOST_REASONS:
        rest = sum(left.share for left in verdict.left[_MOST_REASONS:])
        reasons.append(f"{rest:.1%} for other reasons")
    return (
        verdict.name,
        {"parity": "yes", "planned": "not run"}.get(verdict.outcome, verdict.outcome)
        + " (fp64)" * (verdict.precision == 64),
        f"{verdict.sharded:.1%}{unused}",
        f"{verdict.flops:.0%}",
        f"{verdict.counted:.0%}" if verdict.counted else "",
        f"{verdict.all_reduces:.1f}" + (f" of {verdict.least:g}" if verdict.least else "") + others,
        "; ".join(reasons),
    )


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
