"""A step in time is as long as it is said to be, in the order of the blocks; the page of a plan shows all of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from html.parser import HTMLParser
from itertools import groupby, pairwise
from typing import Any

import pytest
from tiny import meta_model

from lightning_autotp import make_plan
from lightning_autotp.capture.capture import language_model_inputs
from lightning_autotp.layouts.repeats import in_any_layer
from lightning_autotp.layouts.types import Shard, local_shape
from lightning_autotp.planning.machines import Machine
from lightning_autotp.planning.overview import Overview, look_over
from lightning_autotp.planning.page import Node, cards, page, tree
from lightning_autotp.planning.recommend import Recommendation, recommend
from lightning_autotp.planning.rehearsal import one_row
from lightning_autotp.planning.timeline import chrome_trace, merged

MODEL = meta_model("llama", num_hidden_layers=3)
ROW = one_row(MODEL, language_model_inputs(MODEL), 64)


def overview(ranks: int, **options: Any) -> Overview:
    plan, _ = make_plan(MODEL, ranks, **options)
    return look_over(MODEL, plan, ROW, Machine.of("H100"), tokens=256)


@pytest.fixture(scope="module")
def seen() -> Overview:
    return overview(3)


@pytest.fixture(scope="module")
def sizes() -> Recommendation:
    return recommend(MODEL, ROW, "2xH100", tokens_per_step=256)


def test_spans_take_what_the_step_takes(seen: Overview) -> None:
    total = Counter[str]()
    for span in seen.spans:
        total[span.kind] += span.seconds
    expected = {
        one.name: getattr(seen.time, one.name)
        for one in fields(seen.time)
        if one.name not in ("copies", "network", "host")
    }
    assert dict(total) == pytest.approx(expected)
    assert all(one.start + one.seconds == pytest.approx(next_.start) for one, next_ in pairwise(seen.spans))


def test_blocks_run_in_their_order_and_back(seen: Overview) -> None:
    order = [(phase, place) for (phase, place), _ in groupby(seen.spans, key=lambda span: (span.phase, span.place))]
    layers = [f"model.layers.{number}" for number in range(3)]
    assert [place for phase, place in order if phase == "forward" and place] == layers
    assert [place for phase, place in order if phase == "backward" and place] == layers[::-1]
    sent = Counter((span.phase, span.place) for span in seen.spans if span.kind == "tensor_parallel")
    assert all(sent[phase, layer] == 2 for phase in ("forward", "backward") for layer in layers)


def test_the_trace_has_every_operator_and_as_long(seen: Overview) -> None:
    events = [event for event in chrome_trace(seen.spans)["traceEvents"] if event["ph"] == "X"]
    operators = [event for event in events if event["tid"] == 1]
    assert len(operators) == len(seen.spans)
    for row in (0, 1):
        length = sum(event["dur"] for event in events if event["tid"] == row)
        assert length == pytest.approx(1e6 * seen.time.total)
    assert len(list(merged(seen.spans))) < len(seen.spans)


class Words(HTMLParser):
    """The text of a page, all of whose elements must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=["whole tokens", "sequence parallel"])
def test_the_page_shows_the_plan(options: dict[str, Any], sizes: Recommendation) -> None:
    seen = overview(2, **options)
    text = page(seen, sizes)
    words = " ".join(Words(text).text.split())
    assert "http" not in text.replace("http-equiv", ""), "nothing is loaded from elsewhere"
    for said in (*seen.lines(), *seen.plan.differences(), seen.plan.summary, seen.plan.of_memory):
        assert " ".join(said.replace("`", "").split()) in words
    assert "<code>recommend</code>" in text
    whole = [parameter for parameter in seen.plan.parameters if parameter.reasons]
    assert whole
    for parameter in whole:
        assert in_any_layer(parameter.names[0]) in words
        assert all(in_any_layer(str(reason)) in words for reason in parameter.reasons)
    assert "layers.0-2 (3x)" in words
    # In the block every change of a layout is said once.
    [*found] = cards(seen.plan, "model.layers.0")
    said = [change for card in found for change in (*card.before, *card.after)]
    changes = [change for change in seen.plan.conversions if change.module.startswith("model.layers.0")]
    own = [use for use in seen.plan.implementations if use.module.startswith("model.layers.0.")]
    sums = [use for use in own if use.output is not None and use.output[0] != use.output[1]]
    assert len(said) == len(changes) + len(sums) > 3
    assert all(change in words for change in said)
    assert text.count('class="this"') == 1


def test_a_picture_has_each_rank_s_part(seen: Overview) -> None:
    pictures = {
        f"model.layers.0.{card.name}.{picture.name}": picture
        for card in cards(seen.plan, "model.layers.0")
        for picture in card.pictures
    }
    shown = [one for one in seen.plan.parameters if one.names[0] in pictures]
    assert len(shown) == len(pictures) == 9
    cut = [one for one in shown if isinstance(one.layout, Shard)]
    assert len(cut) == 7
    for parameter in cut:
        picture = pictures[parameter.names[0]]
        for rank in range(3):
            area = sum(part.width * part.height for part in picture.stripes if rank in part.ranks)
            local, (rows, columns) = local_shape(parameter.shape, parameter.layout, rank), parameter.shape
            assert area / (picture.width * picture.height) == pytest.approx(local[0] * local[1] / (rows * columns))


def test_the_tree_has_every_parameter(seen: Overview) -> None:
    def leaves(node: Node) -> list[Node]:
        return [node] if node.layout else [leaf for inner in node.inside.values() for leaf in leaves(inner)]

    found = leaves(tree(seen.plan))
    assert len(found) == 3 + 9  # of the layers, which are alike, one
    assert {leaf.layout for leaf in found} == {"sharded", "whole"}
    assert all(leaf.bytes for leaf in found)
