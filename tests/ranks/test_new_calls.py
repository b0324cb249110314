"""Calls that are not like the traced one: right, with the plan as it is or layouts changed for them, or refused."""

from __future__ import annotations

import json
import re
import warnings
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from called import IDS, OTHER_MIXTURES, made, worst
from distributed import PATIENCE, run_ranks
from mixture_configs import MIXTURES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from lightning_autotp import PeerError, UnprovedCall, UnseenPath, parallelize
from lightning_autotp.capture.capture import ExampleCall
from lightning_autotp.parallel import TPGroup
from lightning_autotp.private.distributed_private import default_store
from lightning_autotp.proving import new_calls
from lightning_autotp.proving.call_kinds import Arguments
from lightning_autotp.proving.continued import Begun, BegunCalls
from lightning_autotp.ranks import store_barrier


def encoder_decoder(family: str) -> PreTrainedModel:
    """A small one, with as few operators as it can have."""
    torch.manual_seed(0)
    sizes = {"d_model": 48, "vocab_size": 100, "decoder_start_token_id": 2}
    if family == "bart":
        sizes |= dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
        sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6)
        sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 72) | {"dropout": 0}
    else:
        sizes |= {"d_kv": 8, "num_heads": 6, "d_ff": 72, "num_layers": 1, "dropout_rate": 0}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **sizes))  # type: ignore[no-any-return]


PADDED = torch.tensor([[1] * 7 + [0] * 2, [1] * 9])
COLLECTED = ("attentions", "hidden_states", "router_logits")


def loss_of(model: nn.Module, arguments: dict[str, Any], collected: bool) -> Tensor:
    """The loss, and with it what the call collected of inner activations."""
    output = model(input_ids=IDS, labels=IDS, **arguments)
    loss: Tensor = output.loss
    for name in COLLECTED if collected else ():
        for tensor in output.get(name) or ():
            loss = loss + tensor.float().pow(2).mean() + tensor.flatten()[0]
    return loss


CALLS: list[tuple[dict[str, Any], bool, bool]] = [
    # arguments, training mode, whether a loss is taken of what is collected
    ({"attention_mask": PADDED}, True, False),
    ({}, False, False),
    ({"output_hidden_states": True}, True, True),
    ({"output_attentions": True}, True, True),
    ({"output_attentions": True, "output_hidden_states": True}, False, True),
]
ROUTED: list[tuple[dict[str, Any], bool, bool]] = [
    ({"output_router_logits": True}, True, False),
    ({"output_router_logits": True, "attention_mask": PADDED}, True, True),
]


def other_calls(rank: int, size: int, families: list[str], layers: int) -> None:
    """Every call against one process; then the first kind again, and an option set in the config."""
    for family in families:
        reference, model = made(family, layers), made(family, layers)
        parallelize(model, dist.group.WORLD)
        is_mixture = family in MIXTURES | OTHER_MIXTURES

        def check(arguments: dict[str, Any], training: bool, collected: bool, family: str = family) -> None:
            losses = []
            for each in (model, reference):  # noqa: B023
                each.train(training)
                each.zero_grad()
                losses.append(loss_of(each, arguments, collected))
                losses[-1].backward()
            assert torch.allclose(*losses, rtol=1e-5), (family, arguments, losses)
            assert worst(model, reference) < 2e-5, (family, arguments, worst(model, reference))  # noqa: B023

        for call in CALLS + (ROUTED if is_mixture else []):
            check(*call)
        check({"use_cache": False}, True, False)
        if is_mixture:
            for each in (model, reference):
                each.config.output_router_logits = True
            check({}, True, True)
            with mock.patch.object(new_calls, "trace", side_effect=AssertionError("this kind is proved")):
                check({}, True, True)
            for each in (model, reference):
                each.config.output_router_logits = False
            check({}, True, False)


@pytest.mark.parametrize(
    ("size", "families", "layers"),
    [
        (2, ["gpt_oss"], 1),
        *(
            pytest.param(size, families, 2, marks=pytest.mark.nightly)
            for size, families in (
                (2, ["llama", "olmoe", "qwen3_moe"]),
                (2, ["gpt2", "gpt_oss"]),
                (3, ["gpt2", "gpt_oss"]),
                (4, ["mixtral", "granitemoe", "qwen2_moe"]),
            )
        ),
    ],
)
def test_calls_with_other_arguments_modes_and_settings_are_as_in_one_process(
    size: int, families: list[str], layers: int
) -> None:
    run_ranks(other_calls, size, families, layers)


class Options:
    """A config."""

    def __init__(self) -> None:
        self.width, self.scale = 12, "plain"


class Normalising(nn.Module):
    """Feed-forward; in evaluation, or when it is told to, the inner features are divided by their norm."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, normalise: bool = False) -> Tensor:
        inner = torch.relu(self.up(x))
        if normalise or not self.training:
            inner = inner / inner.norm(dim=-1, keepdim=True)
        if self.options.scale == "twice":
            inner = inner * 2
        out: Tensor = self.down(inner)
        return out


def encoded(rank: int, size: int, families: list[str]) -> None:
    """The encoder's outputs are given: what the model computes in its own call is an input, also with a gradient."""
    for family in families:
        reference, model = encoder_decoder(family), encoder_decoder(family)
        example = {"input_ids": IDS, "decoder_input_ids": IDS, "labels": IDS}
        parallelize(model, dist.group.WORLD, example_inputs=example)
        for needs_gradient in (False, True):
            losses, gradients = [], []
            for each in (model, reference):
                each.zero_grad()
                hidden = torch.randn(2, 9, each.config.d_model, generator=torch.Generator().manual_seed(2))
                hidden.requires_grad_(needs_gradient)
                loss = each(encoder_outputs=(hidden,), decoder_input_ids=IDS, labels=IDS).loss
                loss.backward()
                losses.append(loss.detach())
                gradients.append(hidden.grad)
            assert torch.allclose(*losses, rtol=1e-5), (family, losses)
            assert worst(model, reference) < 2e-5, (family, worst(model, reference))
            if needs_gradient:
                assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7), family


@pytest.mark.parametrize(
    ("size", "families"),
    [
        (2, ["bart"]),
        pytest.param(2, ["t5"], marks=pytest.mark.nightly),
        pytest.param(3, ["bart", "t5"], marks=pytest.mark.nightly),
    ],
)
def test_what_a_module_inside_gives_may_be_given_instead(size: int, families: list[str]) -> None:
    run_ranks(encoded, size, families)


class Masked(Normalising):
    """Divides the inner features by their norm where nothing is masked."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * mask, normalise=bool(mask.sum() == mask.numel()))


def refused(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = Normalising(Options())
    inputs = torch.randn(5, 6)
    parallelize(model, dist.group.WORLD, example_inputs=inputs)
    model(inputs)
    for call in (lambda: model(inputs, normalise=True), lambda: model.eval()(inputs)):
        with pytest.raises((UnprovedCall, PeerError), match=r"whole model does then") as raised:
            call()
        assert "norm" in str(raised.value)
        assert "Normalising is called in another way" in str(raised.value)
    model.train()
    model(inputs)
    masked, padded = Masked(Options()), torch.tensor([[1], [1], [0], [1], [1]])
    parallelize(masked, dist.group.WORLD, example_inputs=(inputs, padded))
    masked(inputs, padded.flip(0))
    with pytest.raises((UnprovedCall, PeerError), match=r"whole model does then") as raised:
        masked(inputs, torch.ones_like(padded))
    assert "norm" in str(raised.value)
    masked(inputs, padded)


def test_a_path_on_which_parts_compute_something_else_is_refused_on_every_rank() -> None:
    run_ranks(refused, 3)


def settings(rank: int, size: int) -> None:
    """A setting that the model reads from its config counts as another kind, and is proved anew."""
    torch.manual_seed(0)
    model, reference = Normalising(Options()), Normalising(Options())
    reference.load_state_dict(model.state_dict())
    inputs = torch.randn(5, 6)
    parallelize(model, dist.group.WORLD, example_inputs=inputs)
    assert torch.allclose(model(inputs[:1]), reference(inputs[:1]), rtol=1e-5)
    for scale in ("twice", "plain", "twice"):
        model.options.scale = reference.options.scale = scale
        assert torch.allclose(model(inputs), reference(inputs), rtol=1e-5)


def test_settings_are_noticed() -> None:
    run_ranks(settings, 2)


def config_copies(rank: int, size: int) -> None:
    """Modules with a copy of the config for their local sizes see what is set in the model's own."""
    model = made("llama")
    parallelize(model, dist.group.WORLD)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    model.config.set_later = "yes"
    model.config.rope_scaling_note = 3
    model(input_ids=IDS, labels=IDS)
    assert all(config.set_later == "yes" for config in configs.values())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.gradient_checkpointing_enable()  # an attribute that was there, and a function that was not
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        model.gradient_checkpointing_disable()
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert not [text for text in map(str, caught) if "not proved" in text]


def test_what_is_set_in_the_config_reaches_every_copy_of_it() -> None:
    run_ranks(config_copies, 2)


class Memory:
    """What is computed in a call is kept for the next one."""

    def __init__(self, is_long: bool = False) -> None:
        self.is_long, self.count, self.computed = is_long, torch.tensor(0), list[Tensor]()


def test_kinds_of_calls() -> None:
    def kind(value: Any) -> Any:
        return Arguments(ExampleCall((value,), {})).kind

    ids = torch.zeros(2, 9, dtype=torch.long)
    assert kind({"ids": ids}) == kind({"ids": torch.ones(3, 4, dtype=torch.long)})
    assert kind({"ids": ids}) == kind({"ids": ids[:1]})
    assert kind({"ids": ids}) != kind({"ids": ids[:, :1]})  # broadcast, perhaps
    assert kind({"ids": ids}) != kind({"ids": ids.float()})
    assert kind({"keep": 0}) != kind({"keep": 1})
    assert kind({"keep": 5}) == kind({"keep": 7})
    assert kind([True]) != kind([1])
    assert kind((ids, None)) != kind((ids,))
    memory = Memory()
    assert kind(memory) == kind(Memory())
    assert kind(memory) != kind(Memory(is_long=True))
    assert Arguments(ExampleCall((memory,), {"ids": ids})).unknown == []
    memory.computed.append(ids.float())
    assert Arguments(ExampleCall((memory,), {"ids": ids})).unknown == ["Memory"]


class Ragged(Normalising):
    """Pads its inner features by lengths, and asks which is the longest."""

    def forward(  # type: ignore[override]
        self, x: Tensor, lengths: list[int], options: dict[str, Any], fade: float
    ) -> Tensor:
        longest = max(lengths)
        assert sum(lengths) <= x.numel()
        is_full = longest == x.shape[1] or len(lengths) == options["rows"]
        return super().forward(x.sum(1)) * (fade if fade > 0.5 and is_full else 1)


def ragged(rank: int, size: int) -> int:
    """How often a model is traced in a hundred steps, each with other lengths."""
    torch.manual_seed(0)
    model, reference = Ragged(Options()), Ragged(Options())
    reference.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(3)
    count = 0

    def counted(*given: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return trace(*given, **options)

    trace = new_calls.trace
    with mock.patch.object(new_calls, "trace", counted):
        for step in range(100):
            lengths = torch.randint(1, 300, (8,), generator=generator).tolist()
            given = torch.randn(8, max(lengths), 6), lengths, {"rows": 8, "of": lengths}, step / 100
            if step == 0:
                parallelize(model, dist.group.WORLD, example_inputs=given)
            assert torch.allclose(model(*given), reference(*given), rtol=1e-4, atol=1e-5)
    return count


def test_lengths_that_are_others_in_each_step_do_not_make_a_proof_of_each() -> None:
    counts = run_ranks(ragged, 2)
    assert 16 <= counts[0] <= 45  # by the first rank for all
    assert counts[1] == 0


def alone(rank: int, model: nn.Module, *given: Any, has_ended: bool = False) -> list[str]:
    """What the first rank says that calls a model alone, in a way that is new."""
    dist.barrier()
    if rank > 0:
        dist.barrier()
        return []
    store = default_store()
    announced = store.get("process/1")
    if has_ended:
        store.set("process/1", json.dumps({**json.loads(announced), "started": 0.0}))
    else:
        store.set_timeout(timedelta(seconds=0.5))
    with mock.patch.object(store_barrier, "PATIENCE", 0.2), pytest.raises(RuntimeError) as raised:
        model(*given)
    store.set("process/1", announced)
    store.set_timeout(timedelta(seconds=PATIENCE))
    dist.barrier()
    return [str(raised.value)]


def unknown(rank: int, size: int) -> list[str]:
    torch.manual_seed(0)
    model = Normalising(Options())
    inputs = torch.randn(5, 6)
    parallelize(model, TPGroup.of(dist.group.WORLD).process_group, example_inputs=inputs)
    said = alone(rank, model, inputs)
    model(inputs)
    model.eval()
    said += alone(rank, model, inputs)
    model.train()
    said += alone(rank, model, inputs, object())
    said += alone(rank, model, inputs, object(), has_ended=True)
    with pytest.warns(UserWarning, match="called with a object, about which nothing is known"):
        model(inputs, object())
    with torch.no_grad():
        model(inputs, object())
    return said


def test_what_cannot_be_described_is_said_and_so_is_who_calls_a_model_alone() -> None:
    said, nothing = run_ranks(unknown, 2)
    assert nothing == []
    first = "Normalising is used, in a call or an optimizer's step, for the first time"
    later = "Normalising is called, for the first time in this way,"
    where = (
        " on rank 0, but not on 1 of the ranks [0, 1]: all of them have to do it, so write that without a condition on"
        " the rank"
    )
    assert said[:3] == [first + where, later + where, later + where]
    assert re.fullmatch(re.escape(later + where) + r"\. rank 1 \(process \d+ on .*\) has ended", said[3])


class Grouped(nn.Module):
    """Feed-forward; when it is told to, the inner features are normalised in groups, as many as an attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.groups = 4

    def forward(self, x: Tensor, grouped: bool) -> Tensor:
        inner = self.up(x).tanh()
        if grouped:
            inner = inner.unflatten(-1, (self.groups, 3)).softmax(-1).flatten(-2)
        out: Tensor = self.down(inner)
        return out


class Recomputed(nn.Module):
    """Its block's activations are not kept for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.LayerNorm(6), Grouped()

    def forward(self, x: Tensor, grouped: bool = False) -> Tensor:
        out: Tensor = checkpoint(self.block, self.first(x), grouped, use_reentrant=False)
        return out


def local_in_one_kind(rank: int, size: int) -> None:
    """An attribute that only some calls read is this rank's size in these, also where they are computed again."""
    torch.manual_seed(0)
    model, reference = Recomputed(), Recomputed()
    reference.load_state_dict(model.state_dict())
    inputs = torch.randn(5, 6)
    parallelize(model, dist.group.WORLD, example_inputs=inputs)
    for grouped in (True, False, True):
        found, wanted = model(inputs, grouped), reference(inputs, grouped)
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            model(inputs, not grouped)
        assert model.block.groups == 4
        for each, output in ((model, found), (reference, wanted)):
            each.zero_grad()
            output.pow(2).sum().backward()
        assert worst(model, reference) < 2e-5
    both = model(inputs, True) + model(inputs, False)
    with pytest.raises(UnprovedCall, match="after calls of different kinds"):
        both.sum().backward()
    kept = model(inputs, True)
    kept.sum().backward(retain_graph=True)
    model(inputs, False).sum().backward()
    with pytest.raises(UnprovedCall, match="after calls of different kinds"):  # of which this is not the last one
        kept.sum().backward()
    model(inputs, True).sum().backward()


class Keeping(nn.Module):
    """Feed-forward; in evaluation a cache is made for the inner features, as mixers with a state do.

    Args:
        size: where the size of that comes from.
    """

    def __init__(self, size: str) -> None:
        super().__init__()
        self.up, self.down, self.size, self.features = nn.Linear(6, 12), nn.Linear(12, 6), size, 12

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x).tanh()
        if not self.training:
            features = {"a tensor": inner.shape[-1], "an attribute": self.features, "a number": 12}[self.size]
            state = torch.zeros(len(x), features)
            state.copy_(inner)
            inner = inner + state
        out: Tensor = self.down(inner)
        return out


def cached_in_evaluation(rank: int, size: int) -> None:
    """Of zeros that a rank's code makes for its part nothing is cut; where they are whole the call is refused."""
    for of in ("a tensor", "an attribute", "a number"):
        torch.manual_seed(0)
        model, reference = Keeping(of), Keeping(of)
        reference.load_state_dict(model.state_dict())
        inputs = torch.randn(5, 6)
        parallelize(model, dist.group.WORLD, example_inputs=inputs)
        for training in (True, False, False, True, False):
            for one in (model, reference):
                one.train(training)
            if of == "a number" and not training:
                with pytest.raises(UnprovedCall, match=r"The size of tensor a \(12\) must match"):
                    model(inputs)
                break
            assert torch.allclose(model(inputs), reference(inputs), rtol=1e-5, atol=1e-6), (of, training)
            assert model.features == 12


class Kept:
    """Keys and values of the calls before, and how many these were."""

    def __init__(self) -> None:
        self.calls, self.keys, self.values = 0, list[Tensor](), list[Tensor]()


class Attending(nn.Module):
    """Attention with a cache, in which something else is done with it when it has become long.

    Args:
        then: what.
    """

    def __init__(self, then: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.then, self.window = then, 5

    def forward(self, x: Tensor, kept: Kept | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if kept is not None:
            kept.calls += 1
            kept.keys.append(k)
            kept.values.append(v)
            k, v = torch.cat(kept.keys, 2), torch.cat(kept.values, 2)
            if self.then == "the last ones" and k.shape[2] > self.window:
                k, v = k[:, :, -self.window :], v[:, :, -self.window :]
            if (self.then == "long" and k.shape[2] > self.window) or (self.then == "often" and kept.calls > 3):
                q = q - q.mean(1, keepdim=True)
        out: Tensor = self.out(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


def test_an_object_that_stays_empty_is_noted_once() -> None:
    begun, kept = BegunCalls(), Kept()

    def noted(length: int, kind: str = "training") -> Begun | None:
        begun.note(ExampleCall((torch.zeros(2, length), kept), {}), kind, (2, length), [kept], length)
        return begun.of([kept])

    first = noted(3)
    assert noted(3) is first
    assert noted(4) is not first
    assert noted(4) is not noted(4, "evaluation")


def continued(rank: int, size: int) -> None:
    """A call with a cache that has become long is proved; or it is refused, as often as it is made."""
    for then in ("the last ones", "long", "often"):
        torch.manual_seed(0)
        model, reference = Attending(then), Attending(then)
        reference.load_state_dict(model.state_dict())
        inputs = torch.randn(2, 3, 16)
        parallelize(model, dist.group.WORLD, example_inputs=inputs)
        for _ in range(2):
            both = (model.eval(), Kept()), (reference.eval(), Kept())
            with torch.no_grad():
                for call in range(5):
                    step = inputs if call == 0 else inputs[:, :1] * call
                    if call == 3 and then != "the last ones":
                        with pytest.raises(UnseenPath, match="it calls mean"):
                            model(step, both[0][1])
                        break
                    found, wanted = (one(step, kept) for one, kept in both)
                    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6), (then, call)
        if then == "long":  # at once
            with torch.no_grad(), pytest.raises(UnprovedCall):
                model(torch.cat([inputs, inputs], 1), Kept())


def local_where_needed(rank: int, size: int) -> None:
    local_in_one_kind(rank, size)
    cached_in_evaluation(rank, size)
    continued(rank, size)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_size_is_local_in_the_calls_that_need_it(size: int) -> None:
    run_ranks(local_where_needed, size)
