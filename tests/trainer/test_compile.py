"""``torch.compile`` of the local model and of its blocks, against one process without it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from selected import nightly, selected
from torch import Tensor
from torch._dynamo.utils import counters
from trainer_ranks import run_trainer_ranks
from training import Task, assert_parity, loader, tiny_config, trainer
from transformers import AutoModelForCausalLM, GPT2Config

from lightning_autotp import AutoTPStrategy, full_state_dict

STEPS = 2
CASES = ("blocks", "inductor", "whole", "late", "changed calls", "sequence parallel")
REPEATS = ("inductor", "late", "changed calls")
"""For nightly tests: the same graphs, compiled by another backend or later. Blocks with layouts that change at calls
are compiled in ``tests/ranks/test_compile_blocks.py`` every day."""


def config(case: str) -> Any:
    if case == "changed calls":
        return GPT2Config(
            vocab_size=67, n_embd=48, n_head=6, n_layer=1, n_positions=16, attn_pdrop=0.0, resid_pdrop=0.0,
            embd_pdrop=0.0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
        )  # fmt: skip
    made = tiny_config()
    made.num_hidden_layers = 2 if case == "blocks" else 1
    return made


class Compiled(Task):
    """Compiles in ``configure_model()``, or ``"late"``: once the model is local."""

    def __init__(self, case: str, enabled: bool) -> None:
        super().__init__("none", 0.1, "SGD")
        self.case, self.enabled = case, enabled

    def build(self) -> Any:
        model = AutoModelForCausalLM.from_config(config(self.case))
        if self.enabled and self.case != "late":
            self.switch_on(model)
        return model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        # A cache would be in another state at every block, and each would be compiled for itself.
        return super().training_step({**batch, "use_cache": False}, batch_idx)

    def on_fit_start(self) -> None:
        if self.enabled and self.case == "late":
            self.switch_on(self.model)

    def on_train_end(self) -> None:
        if self.case == "whole":  # the first forward of this model that is no compiled code
            with torch.compiler.set_stance("force_eager"):
                loss = self.model(**next(iter(loader())), use_cache=False).loss
            self.seen["losses"].append(loss.item())

    def switch_on(self, model: Any) -> None:
        if self.case == "whole":
            model.compile(backend="aot_eager")
            return
        blocks = model.transformer.h if self.case == "changed calls" else model.model.layers
        for block in blocks:
            backend = "inductor" if self.case == "inductor" else "aot_eager"
            block.compile(backend=backend, fullgraph=self.case != "changed calls")


def train(case: str, devices: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    torch._dynamo.reset()
    counters.clear()
    task = Compiled(case, enabled=devices > 1)
    strategy = AutoTPStrategy(devices, 1, sequence_parallel=case == "sequence parallel") if devices > 1 else "auto"
    trainer(strategy, devices, max_steps=STEPS).fit(task, loader())
    task.seen["weights"] = full_state_dict(task) if devices > 1 else task.state_dict()
    task.seen["graphs"] = counters["stats"]["unique_graphs"]
    task.seen["breaks"] = dict(counters["graph_break"])
    return task.seen


def ranks(cases: list[str]) -> dict[str, dict[str, Any]]:
    return {case: train(case, 2) for case in cases}


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return run_trainer_ranks(ranks, 2, selected(request, "case"))


@pytest.mark.parametrize("case", nightly(CASES, REPEATS))
def test_compiled_ranks_equal_one_process(case: str, two: list[dict[str, dict[str, Any]]]) -> None:
    wanted = train(case, 1)
    assert wanted["graphs"] == 0
    for seen in two:
        assert seen[case]["graphs"] > 0
        assert_parity(seen[case], wanted)


@pytest.mark.parametrize("case", nightly(["blocks", "inductor", "sequence parallel"], REPEATS))
def test_blocks_are_whole_graphs(case: str, two: list[dict[str, dict[str, Any]]]) -> None:
    for seen in two:
        assert seen[case]["breaks"] == {}


def test_both_blocks_run_the_same_code(two: list[dict[str, dict[str, Any]]]) -> None:
    for seen in two:
        assert seen["blocks"]["graphs"] == 1


def test_names_do_not_tell(two: list[dict[str, dict[str, Any]]]) -> None:
    for case in two[0]:
        assert not [name for name in two[0][case]["weights"] if "_orig_mod" in name]
