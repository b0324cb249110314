"""The zoo: its table, the parity of a representative dozen in processes, and the planning of every causal model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import PATIENCE, run_ranks
from selected import nightly
from zoo import configs, inputs, modalities, through_the_host
from zoo.__main__ import spelled_out, zoo
from zoo.models import GROUPS, architectures, build, stir, tiny_config
from zoo.parity import PROFILE, _gradient_error, plan_one
from zoo.report import GROUP_TITLES, from_json, summary, to_json, to_markdown, totals
from zoo.run import Ranks, run
from zoo.verdict import GRADIENT_TOLERANCE, LOSS_TOLERANCE, Left, Verdict

import lightning_autotp
from lightning_autotp import make_plan
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parameters.meta import ParameterMeta

# One of each kind: grouped queries, fused projections, one KV head, ALiBi, latent attention, mixtures, a state space
# beside attention, linear attention, post-norms and soft caps, a mask made under torch.vmap, relative positions and
# cross-attention, a head for each codebook, pictures, batch normalization, sounds, videos, series.
# Daily of them: a state space beside attention, sounds, pictures; places of pictures' tokens that the code writes
# through a view, a module that takes numbers or indices. ``ranks/test_new_calls.py`` has the mixture of gpt_oss, and
# ``ranks/test_hub_kernels.py`` layers that an autograd function's backward pass runs again, as Reformer's.
# Each row is one test, run by ranks of its own.
ON_TWO_RANKS = (
    ("causal:bamba", "ctc:wav2vec2", "image-text:qwen2_vl", "image-text:ovis2"),
    ("causal:gpt_oss", "masked:reformer"),
    ("causal:gpt2", "causal:llama", "causal:mixtral", "causal:qwen3_next", "causal:musicgen"),
    ("causal:deepseek_v3", "causal:falcon", "causal:bloom", "causal:gemma2", "causal:fuyu"),
    ("causal:gemma3", "masked:bert", "seq2seq:t5", "image:vit", "image:resnet"),
    ("token:deberta-v2", "question:t5", "text:roberta", "audio:whisper", "speech:moonshine"),
    ("video:vivit", "series:timesfm", "sequence:qwen3_next", "speech:speecht5"),
)  # fmt: skip
# One KV head and two.
ON_FOUR_RANKS = ("causal:falcon", "causal:llama")

# All models are planned in so many tests, each every so many-th one.
PARTS = 199
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
# The causal models with less than nine tenths of their parameters sharded, and the share that they have at least.
LESS_SHARDED = {"blt": 0.8, "prophetnet": 0.86, "mllama": 0.65, "gemma3n": 0.4}


def parity(*names: str, ranks: int = 2) -> list[Verdict]:
    split = [name.partition(":") for name in names]
    return list(run([(group, name) for group, _, name in split], ranks, PATIENCE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [ON_TWO_RANKS[0], *(pytest.param(names, marks=pytest.mark.nightly) for names in ON_TWO_RANKS[1:])],
    ids=" ".join,
)
def test_loss_and_gradients_equal_one_process(names: tuple[str, ...]) -> None:
    for verdict in parity(*names):
        check(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly(ON_FOUR_RANKS, ON_FOUR_RANKS[1:]))
def test_more_ranks_than_key_heads(name: str) -> None:
    (verdict,) = parity(name, ranks=4)
    check(verdict)


LESS_DIVIDED = {"resnet": 0.75}
"""Where the first convolutions are products that every rank does whole."""


def check(verdict: Verdict) -> None:
    assert verdict.is_parity, f"{verdict.name}: {verdict.outcome}: {verdict.reason}"
    assert verdict.loss_error <= LOSS_TOLERANCE
    assert verdict.gradient_error <= GRADIENT_TOLERANCE
    assert verdict.compared > 0
    assert verdict.worst
    assert verdict.sharded >= 0.9, f"{verdict.name}: {verdict.sharded:.1%} sharded, {verdict.left[:2]}"
    assert verdict.flops >= LESS_DIVIDED.get(verdict.name, 0.85)
    assert verdict.counted >= LESS_DIVIDED.get(verdict.name, 0.85)


@pytest.mark.parametrize("group", GROUPS)
def test_the_table_names_architectures_only(group: str) -> None:
    known = set(architectures(group))
    assert {name for g, name in {*configs.LEFT_OUT, *configs.TIMM} if g == group} <= known
    everyone = {name for g in GROUPS for name in architectures(g)}
    assert {name.rpartition(":")[2] for name in configs.OVERRIDES} <= everyone
    assert configs.LEAST_ALL_REDUCES.keys() <= everyone
    assert {*inputs.LENGTHS, *inputs.CROSS_ATTENTION, *inputs.CODEBOOKS, *inputs.MORE_IDS, *inputs.ENTITIES} <= everyone
    assert inputs.GLOBAL_ATTENTION | inputs.TYPED_PLACEHOLDERS | modalities.names() <= everyone
    kinds = {*inputs.KINDS_OF_TOKENS, *inputs.KINDS_OF_EXPERTS, *inputs.ANSWERS_ALONE, *inputs.NO_LABELS}
    assert kinds | {*inputs.MARKED_PLACES, *inputs.SEEN_PICTURES} <= everyone


def test_tiny_configs_have_every_kind_of_layer_and_nothing_random() -> None:
    config = tiny_config("qwen3_next")
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    nested = tiny_config("gemma3").get_text_config()
    assert (nested.hidden_size, nested.vocab_size, set(nested.layer_types)) == (
        64, configs.VOCABULARY, {"sliding_attention", "full_attention"},
    )  # fmt: skip
    assert tiny_config("gpt2").resid_pdrop == 0


def test_stirring_leaves_no_zeros_or_ones() -> None:
    torch.manual_seed(0)
    model = build("gpt2")
    assert any(bool((parameter == 0).all()) for parameter in model.parameters())
    stir(model)
    assert not any(bool((p == 0).all() or (p == 1).all()) for p in model.parameters())


def test_placeholders_stand_for_a_picture_and_are_not_predicted() -> None:
    config = tiny_config("got_ocr2")
    batch = inputs.training_batch("got_ocr2", "causal", config)
    places = batch["input_ids"] == config.image_token_id
    assert places.sum(1).tolist() == [4] * modalities.BATCH
    assert (batch["labels"][places] == -100).all()
    assert batch["pixel_values"].shape[:2] == (modalities.BATCH, 3)


def test_types_tell_where_placeholders_stand() -> None:
    config = tiny_config("gemma3")
    batch = inputs.training_batch("gemma3", "causal", config)
    assert batch["token_type_ids"].equal((batch["input_ids"] == config.image_token_id).long())


def test_batches_differ_by_their_seed_and_agree_in_their_shapes() -> None:
    config = tiny_config("got_ocr2")
    one, two = (inputs.training_batch("got_ocr2", "causal", config, seed) for seed in (0, 1))
    assert {key: value.shape for key, value in one.items()} == {key: value.shape for key, value in two.items()}
    assert not one["input_ids"].equal(two["input_ids"])


@pytest.mark.parametrize(("changed", "found"), [(0.0, 0.0), (1e-9, 0.0), (0.5, 0.25), (float("nan"), float("inf"))])
def test_a_gradient_is_compared_with_its_part_of_the_whole(changed: float, found: float) -> None:
    layout = Shard(((0, Ownership(3, (((0, 1),), ((1, 3),)))),))
    parameter = torch.nn.Parameter(torch.zeros(2))
    meta = ParameterMeta(("weight",), (3,), torch.float32, layout, rank=1, ranks=2)
    whole = torch.tensor([-2.0, 0.25, 0.5])
    parameter.grad = whole[1:] + torch.tensor([0.0, changed])
    assert _gradient_error(parameter, meta, {"weight": whole}, rounding=1e-7) == found


@pytest.mark.nightly
def test_an_architecture_that_fails_does_not_stop_the_next() -> None:
    unknown, left_out, good = parity("causal:no such architecture", "causal:gemma4_assistant", "causal:llama")
    assert unknown.outcome == "error"
    assert "KeyError" in unknown.reason
    assert left_out.outcome == "left out"
    check(good)


@pytest.mark.nightly
def test_ranks_that_do_not_answer_are_ended_and_replaced() -> None:
    with Ranks(1, limit=0.01, plan_only=True) as ranks:
        late = ranks.verdict("llama", "causal")
        ranks.limit = PATIENCE
        then = ranks.verdict("llama", "causal")
    assert late.outcome == "error"
    assert "no answer" in late.reason
    assert then.outcome == "planned"


def verdicts() -> list[Verdict]:
    left = [Left(0.25, "a.weight", "an | operator"), Left(0.1, "b", "c"), Left(0.01, "d", "e")]
    good = Verdict("good", "causal", 2, "parity", parameters=10, sharded=0.95, flops=1.0, all_reduces=2.0, least=2.0)
    part = Verdict("part", "causal", 2, "parity", parameters=10, sharded=0.6, left=left, unused=0.2, least=1.0)
    return [
        good,
        part,
        Verdict("odd", "causal", 2, "wrong", "the loss is 2 instead of 1", parameters=10, sharded=0.99),
        Verdict("none", "causal", 2, "error", "ValueError: no"),
        Verdict("out", "image", 2, "left out", "it has no loss"),
    ]


def test_totals_count_only_what_holds() -> None:
    assert list(totals(verdicts()).values()) == [5, 4, 3, 2, 1, 1, 1]


def test_page_is_the_same_for_the_same_verdicts_and_says_how_it_was_made() -> None:
    page = to_markdown(verdicts(), "make zoo --tp 2", {"torch": "1"})
    assert page == to_markdown(verdicts(), "make zoo --tp 2", {"torch": "1"})
    assert "`make zoo --tp 2` with torch 1" in page
    assert "| Causal language models | 4 | 4 | 3 | 2 | 1 | 1 | 1 |" in page
    assert "60.0% (20%)" in page
    assert "25.0% `a.weight`: an \\| operator; 10.0% `b`: c; 1.0% for other reasons |" in page
    assert page.index("| parity |") < page.index("| good |")
    assert json.loads(to_json(verdicts(), "zoo"))["totals"]["causal"]["wrong"] == 1


def test_page_counts_who_divides_all_flops_and_communicates_least() -> None:
    def parity(counted: float, all_reduces: float, least: float, gathers: float = 0.0) -> Verdict:
        numbers = {"counted": counted, "all_reduces": all_reduces, "least": least, "other_collectives": gathers}
        return Verdict("some", "causal", 2, "parity", parameters=10, **numbers)

    found = [parity(0.95, 2, 2), parity(0.94, 2, 2), parity(1.0, 3, 2), parity(1.0, 1.5, 2, 0.5)]
    page = to_markdown(found, "zoo", {})
    assert (
        "Of 4, 3 divide at least 95% of the counted FLOPs; 2 have the fewest all-reduces known, and no gathers." in page
    )
    page = to_markdown([*found, parity(1.0, 2, 0)], "zoo", {})
    assert "Of 5, 4 divide" in page
    assert "2 of 4 have the fewest" in page


def test_a_line_per_architecture_says_what_was_found() -> None:
    good, part, odd, none, out = map(summary, verdicts())
    assert good.startswith("good")
    assert "95.0% sharded" in good
    assert "loss 0e+00" in good
    assert part.endswith("25.0% whole: a.weight: an | operator")
    assert "wrong" in odd
    assert odd.endswith("the loss is 2 instead of 1")
    assert none.split() == ["none", "error", "ValueError:", "no"]
    assert out.endswith("it has no loss")


def test_command_line_spelling() -> None:
    words = ["zoo", "--only", "llama", "gpt2", "--found", "a.json", "--tp", "4", "--plan-only"]
    spelled = ["zoo", "--only+=llama", "--only+=gpt2", "--found+=a.json", "--tp", "4", "--plan_only=true"]
    assert spelled_out(words) == spelled


def test_what_was_found_is_not_run_again(tmp_path: Path) -> None:
    found, page = tmp_path / "found.json", tmp_path / "page.md"
    found.write_text(to_json([verdict for verdict in verdicts() if verdict.group == "causal"], "--tp 3"))
    with pytest.raises(SystemExit, match=r"found.json is of a run with --tp 3, this one is with --tp 2"):
        zoo("causal", only=["llama"], found=[found], page=page)
    llama = replace(verdicts()[1], name="llama")  # a verdict that no run would give
    found.write_text(to_json([llama], "--tp 3"))
    assert from_json(found.read_text()) == ("--tp 3", [llama])
    zoo("causal", tp=3, only=["llama"], found=[found], page=page)
    assert "| llama | yes | 60.0%" in page.read_text()


def on_the_page() -> dict[tuple[str, str], float]:
    """How much of every model that was in parity is sharded, as the page says."""
    groups, found, group = {title: group for group, title in GROUP_TITLES.items()}, {}, ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            group = groups[line.removeprefix("## ")]
        name, outcome, share, *_ = [*line.strip("| ").split(" | "), "", ""]
        if group and outcome.startswith("yes"):
            found[group, name] = float(share.partition("%")[0]) / 100
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS))])
def test_every_model_is_planned_as_the_page_says(part: int) -> None:
    torch.set_num_threads(1)
    said = {key: share for key, share in on_the_page().items() if not configs.why_left_out(*key)}
    assert len(said) > 790
    plans = {(group, name): plan_one(name, group, 2) for group, name in sorted(said)[part::PARTS]}
    assert {key: verdict.reason for key, verdict in plans.items() if verdict.outcome != "planned"} == {}
    assert {key: verdict.sharded for key, verdict in plans.items() if verdict.sharded < said[key] - 0.001} == {}


ALL_REDUCES = {
    "llama": 2, "falcon": 1, "codegen": 1, "falcon_h1": 2, "mamba": 2, "mamba2": 1, "rwkv": 3, "jamba": 3,
    "olmo2": 4, "deepseek_v3": 4, "qwen3_next": 2, "gpt_oss": 2, "zamba2": 4, "got_ocr2": 2, "musicgen": 3,
}  # fmt: skip
"""One for each row-parallel product, sum or statistic. RWKV sums its receptance, too."""
ALIKE = ("codegen", "falcon_h1", "mamba", "jamba", "gpt_oss", "zamba2", "got_ocr2")
"""Whose kinds of layers others have, too: for nightly tests."""


def test_a_module_that_runs_twice_with_other_layouts_keeps_all_tokens() -> None:
    model = build("zaya", num_hidden_layers=1)
    batch = inputs.training_batch("zaya", "causal", model.config)
    plan, _ = make_plan(model, 2, example_inputs=batch, profile=PROFILE, sequence_parallel=True)
    assert plan.sharded_fraction > 0.96


@pytest.mark.parametrize("name", nightly(ALL_REDUCES, ALIKE))
def test_all_reduces_of_a_layer(name: str) -> None:
    verdict = plan_one(name, "causal", 2)
    assert (verdict.all_reduces, verdict.other_collectives) == (ALL_REDUCES[name], 0)
    assert verdict.has_fewest_collectives == (name != "rwkv")


def test_nineteen_of_twenty_causal_models_are_nine_tenths_sharded() -> None:
    shares = {name: share for (group, name), share in on_the_page().items() if group == "causal"}
    assert len(shares) >= 186
    assert LESS_SHARDED.keys() <= shares.keys()
    assert len(LESS_SHARDED) <= 0.05 * len(shares)
    assert {name: share for name, share in shares.items() if share < LESS_SHARDED.get(name, 0.9)} == {}


def test_the_package_does_not_know_the_zoo() -> None:
    package = Path(lightning_autotp.__file__).parent
    others = [path for path in package.rglob("*.py") if path.name != "cli.py"]
    assert len(others) > 20
    assert not [path.name for path in others if "zoo" in path.read_text()]


def collectives(rank: int, ranks: int) -> dict[str, list[float]]:
    """Every call of the group that sends through the host, in a group of its own."""
    through_the_host.begin()
    group = dist.new_group(backend=through_the_host.BACKEND)
    own = torch.arange(4.0) + 10 * rank
    found = {"sum": own.clone(), "largest": own.clone(), "sent": own.clone()}
    dist.all_reduce(found["sum"], group=group)
    dist.all_reduce(found["largest"], dist.ReduceOp.MAX, group=group)
    dist.broadcast(found["sent"], src=1, group=group)
    found["gathered"] = own.new_empty(4 * ranks)
    dist.all_gather_single(found["gathered"], own, group=group)
    parts = [torch.empty(4) for _ in range(ranks)]
    dist.all_gather(parts, own, group=group)
    found["list"] = torch.cat(parts)
    found["scattered"] = own.new_empty(4 // ranks)
    dist.reduce_scatter_single(found["scattered"], own, group=group)
    found["exchanged"] = own.new_empty(4)
    dist.all_to_all_single(found["exchanged"], own, group=group)
    dist.barrier(group=group)
    return {name: value.tolist() for name, value in found.items()}


def test_ranks_of_one_gpu_send_through_the_host() -> None:
    first, second = run_ranks(collectives, 2)
    assert first["sum"] == second["sum"] == [10, 12, 14, 16]
    assert first["largest"] == second["largest"] == [10, 11, 12, 13]
    assert first["sent"] == second["sent"] == [10, 11, 12, 13]
    assert first["gathered"] == second["gathered"] == first["list"] == [0, 1, 2, 3, 10, 11, 12, 13]
    assert (first["scattered"], second["scattered"]) == ([10, 12], [14, 16])
    assert (first["exchanged"], second["exchanged"]) == ([0, 1, 10, 11], [2, 3, 12, 13])
