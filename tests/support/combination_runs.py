"""Train a combination of options on its ranks and in one process, and tell whether they did the same.

What may differ is what rounding explains, and how much that is, one process shows: it trains again from weights that
are off by what the run's precision rounds them to. Where that changes a result (a key's bias, whose gradient is
rounding alone, moves by a whole step of Adam in any direction), so may several ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from combination_drivers import on_ranks, on_to_one_process, one_process
from combination_task import EPOCHS, ROUNDED_TO, STEPS_OF_EPOCH, adapted_model, batches, kernels, loss_of, new_model
from combinations import Combination
from exported import contents
from torch import Tensor
from trainer_ranks import run_trainer_ranks

# Errors that say clearly that a combination is not for several ranks, or for nobody: a part of the message, and of
# which combinations it is the right answer. Any other error is a mistake.
REFUSALS: dict[str, Callable[[Combination], bool]] = {
    "Adafactor computes its update from whole tensors": lambda c: c.optimizer == "Adafactor",
    "generate needs all tokens on every rank": lambda c: c.generates and c.sequence_parallel != "no",
    # Lightning's own, in one process as well.
    "does not allow for gradient clipping because it performs unscaling of gradients internally": lambda c: (
        c.optimizer == "Adam-fused" and c.clip != "none" and c.precision.endswith("-mixed") and c.driver == "trainer"
    ),
}

# Relative to their size: losses, which may be of float32, and everything else. In low precision only noise says what
# may be.
_CLOSE = {"32-true": (1e-5, 1e-4), "float64": (2e-7, 1e-8)}
_NORMS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "elements": (lambda apart: apart.abs().max(), 8.0),
    "norm": (torch.linalg.vector_norm, 4.0),
}
"""How differences are measured, and how many times the noise they may be: it is about once or twice, and a sum over
many elements varies less than the largest of them."""
_NOISY_RUNS, _MORE_NOISY_RUNS = 2, 6
"""The latter where the first ones do not explain a difference: in one run of many a token goes to another expert."""
_MARGIN = 8.0
"""How many times the noise of its logits a token has to be ahead of the next one, to be the same everywhere."""
_VISIBLE = 0.5
"""Rounding must not explain a difference of so much of a gradient, in most of them."""


@dataclass
class Verdict:
    """What came of a combination.

    Attributes:
        combination: that was tried.
        outcome: ``equal``, ``refused``, ``different`` or ``error``; ``unclear`` where rounding would explain anything.
        reason: the refusal, the differences or the error.
    """

    combination: Combination
    outcome: str
    reason: str = ""

    @property
    def is_right(self) -> bool:
        return self.outcome in ("equal", "refused", "unclear")


def tried(combination: Combination) -> Verdict:
    """Train it on its ranks and in one process."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(directory)
        if combination.source == "directory":
            made = new_model(combination)
            made.save_pretrained(folder / "source")
        try:
            wanted = one_process(combination, folder / "alone")
        except Exception as error:
            return _failed(combination, f"one process: {type(error).__name__}: {error}")
        data = batches(combination)
        try:
            ranks = run_trainer_ranks(on_ranks, combination.ranks, combination, folder, data)
        except RuntimeError as error:
            return _failed(combination, str(error))
        if other := exported_otherwise(combination, folder, ranks[0]["after"]):
            return Verdict(combination, "different", other)
        if combination.resume == "to-one-process":
            ranks = [on_to_one_process(combination, folder, first) for first in ranks]
        noisy: list[dict[str, Any]] = []
        for more in (_NOISY_RUNS, _MORE_NOISY_RUNS):
            for number in range(len(noisy) + 1, len(noisy) + more + 1):
                noisy.append(one_process(combination, folder / f"noisy {number}", noise=number))
            if not (found := differences(combination, ranks, wanted, noisy)):
                break
        hidden = "" if found else _hidden(combination, wanted, noisy)
    outcome = "different" if found else "unclear" if hidden else "equal"
    return Verdict(combination, outcome, "\n".join(found) or hidden)


def simplest(combination: Combination, say: Callable[[str], None]) -> Verdict:
    """Of a combination that is wrong the simplest that is: making any one more option plain makes it right."""
    verdict = tried(combination)
    while not verdict.is_right:
        for simpler in verdict.combination.simpler():
            next_one = tried(simpler)
            say(f"{next_one.outcome}: {simpler}")
            if not next_one.is_right:
                verdict = next_one
                break
        else:
            break
    return verdict


def _failed(combination: Combination, error: str) -> Verdict:
    refused = any(part in error and holds(combination) for part, holds in REFUSALS.items())
    return Verdict(combination, "refused" if refused else "error", error)


def exported_otherwise(combination: Combination, folder: Path, state: dict[str, Tensor]) -> str:
    """Where files that ranks have exported are not, byte for byte, those that one process writes of the same state."""
    if combination.export == "none":
        return ""
    with kernels(combination), torch.no_grad():
        model = adapted_model(combination, folder)
        loss_of(combination, model, batches(combination)[0])  # which a configuration may learn from
    if combination.precision == "bf16-true":
        model.to(torch.bfloat16)
    inner = "model." if combination.driver == "trainer" else ""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if combination.base == "plain" or "lora_" in name:  # a quantized base is not exported
                value.copy_(state[inner + name])
    model.save_pretrained(folder / "wanted")
    found, wanted = _files(folder / "exported"), _files(folder / "wanted")
    other = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    return "\n".join(f"exported {name} is {found.get(name)}, not {wanted.get(name)}" for name in other)


def _files(folder: Path) -> dict[str, str]:
    """What is in each of a directory's files, in few words: an entry of JSON, a checksum of anything else."""
    found: dict[str, str] = {}
    for name, written in contents(folder).items():
        if name.endswith(".json"):  # PEFT writes sets, in any order
            told = json.loads(written)
            found |= {f"{name}, {k}": str(sorted(v, key=str) if isinstance(v, list) else v) for k, v in told.items()}
        else:
            found[name] = hashlib.sha256(written).hexdigest()
    return found


def differences(
    combination: Combination, ranks: list[dict[str, Any]], wanted: dict[str, Any], noisy: list[dict[str, Any]]
) -> list[str]:
    """Where ranks did something else than one process, beyond what rounding explains; the largest first."""
    if combination.resume == "from-one-process":
        wanted, *noisy = (_second_half(run) for run in (wanted, *noisy))
    # Each copy has its own losses; their average is that of one process.
    together = {**ranks[0], "losses": torch.tensor([run["losses"] for run in ranks]).mean(0).tolist()}
    before = wanted["before"]
    expected, others = _flat(wanted, before), [_flat(run, run["before"]) for run in noisy]
    said: dict[str, float] = {}
    for number, run in enumerate([together, *ranks[1:]]):
        found = _flat({**run, "losses": together["losses"]}, before)
        if missing := expected.keys() - found.keys():
            return [f"rank {number} has no {', '.join(sorted(missing)[:3])} (of {len(missing)})"]
        if more := {key for key in found.keys() - expected.keys() if not key.startswith("gradient")}:
            return [f"rank {number} has a {', '.join(sorted(more)[:3])} (of {len(more)})"]
        for key, value in expected.items():
            for name, (norm, times) in _NORMS.items():
                off = float(norm(found[key] - value)) if value.numel() else 0.0
                allowed = _allowed(combination, norm, times, key, expected, others, before)
                if not off <= allowed:
                    size = float(norm(value))
                    text = f"rank {number}: {key} is off by {off:.3g} of {size:.3g} ({name}); rounding: {allowed:.1g}"
                    said[text] = off / max(allowed, 1e-30)
        said |= dict.fromkeys(_other_text(combination, number, run, wanted, noisy), float("inf"))
    return sorted(said, key=lambda text: -said[text])[:8]


def _other_text(
    combination: Combination, number: int, run: dict[str, Any], wanted: dict[str, Any], noisy: list[dict[str, Any]]
) -> Iterator[str]:
    """Where a rank wrote other tokens, or thought otherwise of the first one."""
    copy = number // combination.tensor_ranks
    for at, texts in enumerate(wanted["written"]):
        (found, seen), (tokens, logits), others = (
            run["written"][at][0], texts[copy], [other["written"][at][copy] for other in noisy]
        )  # fmt: skip
        noise = torch.stack([(other - logits).abs().amax(-1) for _, other in others]).amax(0)
        first, second = logits.topk(2).values.unbind(-1)
        # Where rounding may choose another token, all that follow may be others, too.
        sure = torch.stack([other == tokens for other, _ in others]).all(0) & (first - second > _MARGIN * noise)
        if found.shape != tokens.shape or ((found != tokens) & sure.cumprod(1).bool()).any():
            yield f"rank {number}: text {at} is {found.tolist()}, not {tokens.tolist()}"
        off, allowed = float((seen - logits)[:, 0].abs().max()), _MARGIN * float(noise[:, 0].max())
        of_losses, _ = _close(combination)
        if not off <= max(allowed, of_losses * float(logits.abs().max())):
            yield f"rank {number}: logits of text {at} are off by {off:.3g}; rounding: {allowed:.1g}"


def _hidden(combination: Combination, wanted: dict[str, Any], noisy: list[dict[str, Any]]) -> str:
    """That rounding hides too many gradients, if it does. (Weights of few bits hardly move in any case.)"""
    before = wanted["before"]
    expected, others = _flat(wanted, before), [_flat(run, run["before"]) for run in noisy]
    gradients = {key: value for key, value in expected.items() if key.startswith("gradient") and value.any()}
    visible = sum(
        any(
            _allowed(combination, norm, times, key, expected, others, before) < _VISIBLE * float(norm(value))
            for norm, times in _NORMS.values()
        )
        for key, value in gradients.items()
    )
    if visible < len(gradients) / 2:
        return f"rounding hides all but {visible} of {len(gradients)} gradients"
    return ""


def _allowed(
    combination: Combination,
    norm: Callable[[Tensor], Tensor],
    times: float,
    key: str,
    expected: dict[str, Tensor],
    others: list[dict[str, Tensor]],
    before: dict[str, Tensor],
) -> float:
    """The difference of a result that rounding explains."""
    if not expected[key].numel():
        return 0.0
    noise = max(float(norm(other[key] - expected[key])) for other in others)
    return max(times * noise, _floor(combination, norm, key, expected, before))


def _second_half(run: dict[str, Any]) -> dict[str, Any]:
    half = {key: run[key][len(run[key]) // 2 :] for key in ("losses", "evaluated", "gradients", "written")}
    return {**run, **half}


def _flat(run: dict[str, Any], before: dict[str, Tensor]) -> dict[str, Tensor]:
    """All that is compared, by what it is: of weights, how far they moved."""
    found = {f"{kind} {n}": torch.tensor(each) for kind in ("losses", "evaluated") for n, each in enumerate(run[kind])}
    for step, gradients in enumerate(run["gradients"]):
        found |= {f"gradient {step} of {name}": value for name, value in gradients.items()}
    found |= {f"move of {name}": value.double() - before[name].double() for name, value in run["after"].items()}
    return {key: value.double() for key, value in found.items()}


def _rounding(combination: Combination) -> float:
    return torch.finfo(ROUNDED_TO.get(combination.precision, torch.bfloat16)).eps


def _close(combination: Combination) -> tuple[float, float]:
    """Relative to their size, what losses and everything else may be off by, whatever the noise."""
    # A loss of 16 bits is rounded several times on its way, which weights that are off do not show.
    return _CLOSE.get(combination.precision, (2 * _rounding(combination), _rounding(combination)))


def _floor(
    combination: Combination,
    norm: Callable[[Tensor], Tensor],
    key: str,
    expected: dict[str, Tensor],
    before: dict[str, Tensor],
) -> float:
    """A difference that is rounding whatever the noise."""
    rounding = _rounding(combination)
    of_losses, of_others = _close(combination)
    size = float(norm(expected[key]))
    if key.startswith(("losses", "evaluated")):
        return of_losses * size
    if match := re.match(r"gradient \d+ of ", key):
        largest = max(float(v.abs().max()) for k, v in expected.items() if k.startswith(match[0][:11]) and v.numel())
        return max(of_others * size, rounding * largest)
    start = before[key.removeprefix("move of ")]
    stored = torch.finfo(start.dtype).eps if start.is_floating_point() else 0.0
    return max(of_others * size, EPOCHS * STEPS_OF_EPOCH * stored * float(norm(start.double())))
