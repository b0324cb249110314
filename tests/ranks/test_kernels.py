"""Attention through kernels: the plan of ``scaled_dot_product_attention``, and what one process computes."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hub_kernels import install_flash_attention_of_the_hub
from kernel_stand_ins import FLASH_2, FLASH_3, install_flash_attention, varlen_attn
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

from lightning_autotp import full_gradients, parallelize

FAMILIES = (
    "llama", "qwen3", "mistral", "gemma3_text", "olmo2", "phi3", "smollm3", "granite", "gpt_neox", "mixtral", "cohere",
    "stablelm",
)  # fmt: skip
KERNELS = ("eager", FLASH_2, "flex_attention", "varlen")
HUB_FLASH = "kernels-community/flash-attn2"
OTHER_NAMES = ("paged|sdpa", HUB_FLASH)
"""For caches of pages, which there are none of in training; as transformers loads it from the Hub."""
PACKED = {
    "packed": ("sdpa", "eager", FLASH_2, FLASH_3, "flex_attention"),
    "lengths": ("sdpa", FLASH_2, FLASH_3, "varlen"),
    "documents": ("sdpa", "eager", "flex_attention"),
    "padded": ("sdpa", "eager", FLASH_2, "flex_attention"),
}
"""Batches of several sequences in a row, and padded ones, each with the attention that understands it."""
BY_HEAD = ("slopes", "scores", "compiled scores", "number", "mask", "compiled mask")
"""Kernels that compute something else for each head (see :class:`AttentionByHead`)."""


@dataclass(frozen=True)
class Cells:
    """With which attention each kind of call is tried, beside plain attention.

    Attributes:
        by_head: kernels that compute something else for each head.
        heads: for numbers of query and key/value heads.
        plain: for rows of one length; llama has the names of ``OTHER_NAMES`` too.
        packed: for batches of several sequences, and padded ones.
    """

    by_head: tuple[str, ...]
    heads: dict[tuple[int, int], tuple[str, ...]]
    plain: tuple[str, ...]
    packed: dict[str, tuple[str, ...]]


EVERY = Cells(BY_HEAD, dict.fromkeys([(8, 1), (5, 1), (6, 6)], KERNELS), (*KERNELS, FLASH_3), PACKED)
"""All of them, on two ranks."""
SOME = Cells(
    by_head=("slopes", "compiled scores", "number", "mask"),
    heads={(8, 1): (FLASH_2,), (5, 1): ("flex_attention",)},
    plain=(),
    packed={
        "packed": ("sdpa", FLASH_2, "flex_attention"),
        "lengths": (FLASH_3, "varlen"),
        "documents": ("sdpa", "flex_attention"),
        "padded": (FLASH_2,),
    },
)
"""Each kernel and batch, where they are most likely to disagree with plain attention; eager attention of padded batches
is in ``test_new_calls.py``, and heads of which each has keys of its own in ``planning/test_attention_plans.py``."""


def attend_in_one_sequence(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **given: Any
) -> tuple[Tensor, None]:
    """An attention function for transformers that calls ``varlen_attn`` with the sequences, or else with the rows."""
    rows, _, length, _ = query.shape
    ends = given.get("cu_seq_lens_q")
    if ends is None:
        ends = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    out = torch.nn.attention.varlen.varlen_attn(  # type: ignore[attr-defined]
        *packed, ends, ends, length, length, scale=scaling, window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.unflatten(0, (rows, length)), None


def with_kernels() -> None:
    """Make every kernel runnable on a CPU, in this process."""
    from torch.nn.attention import varlen

    torch.compiler.set_stance("force_eager")
    install_flash_attention()
    install_flash_attention_of_the_hub()
    flex_attention._validate_device = lambda *_: None  # type: ignore[attr-defined]
    varlen.varlen_attn.__code__ = varlen_attn.__code__
    vars(varlen)["flash_attn_varlen_func"] = varlen_attn.__globals__["flash_attn_varlen_func"]
    AttentionInterface.register("varlen", attend_in_one_sequence)
    AttentionMaskInterface.register("varlen", lambda *_, **__: None)


Found = tuple[Any, float, float]


@lru_cache
def batches() -> dict[str, dict[str, Any]]:
    """Rows of one length; two sequences in a row, told by positions, lengths or a mask; a row that ends early."""
    plain = token_batch(0)
    ids, mask = plain["input_ids"], torch.ones_like(plain["input_ids"])
    mask[0, 10:] = 0
    row: dict[str, Any] = {"input_ids": ids[:1], "labels": plain["labels"][:1]}
    row["position_ids"] = torch.cat([torch.arange(6), torch.arange(11)])[None]
    row["use_cache"] = False  # with one, transformers takes no positions for a beginning
    ends = torch.tensor([0, 6, 17], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}
    document = (torch.arange(17) >= 6).long()
    seen = (document[:, None] == document) & torch.ones(17, 17, dtype=torch.bool).tril()
    return {
        "plain": plain,
        "packed": row,
        "lengths": {**row, **lengths},
        "documents": {**row, "attention_mask": torch.zeros(1, 1, 17, 17).masked_fill(~seen, -torch.inf)},
        "padded": {
            "input_ids": ids, "labels": plain["labels"].masked_fill(mask == 0, -100), "attention_mask": mask,
        },
    }  # fmt: skip


def block_mask() -> Any:
    """The mask of ``"documents"`` for FlexAttention."""
    document = (torch.arange(17) >= 6).long()

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[q] == document[k])

    return flex_attention.create_block_mask(seen, None, None, 17, 17, "cpu")


def trained(family: str, attention: str, batch: dict[str, Any], again: bool = False, **changes: Any) -> Found:
    """What is communicated in a step, how far its gradients are from one process's, and the loss of that one.

    Args:
        family: of the model.
        attention: its implementation.
        batch: of the step.
        again: whether activations are computed again in the backward pass.
        **changes: of the configuration.
    """
    model = tiny_model(family, **changes)
    if again:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    if attention == HUB_FLASH:
        model.set_attn_implementation(f"paged|{attention}")
        assert model.config._attn_implementation == attention
    else:
        model.config._attn_implementation = attention
    whole = copy.deepcopy(model)
    parallelize(model, dist.group.WORLD, example_inputs=batch)  # type: ignore[arg-type]
    losses = [one(**batch).loss for one in (whole, model)]
    for loss in losses:
        loss.backward()
    gradients = full_gradients(model)
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert wanted.keys() <= gradients.keys()
    far = max(float((gradients[name] - gradient).abs().max()) for name, gradient in wanted.items())
    return model.autotp.plan.communication, far, float(losses[0])


def compiled_alone(graph: GraphModule, _: Any) -> Any:
    """A backend of ``torch.compile`` that compiles nothing, and takes FlexAttention alone."""
    (kernel,) = [node.target for node in graph.graph.nodes if "flex_attention" in str(node.target)]
    COMPILED.append(str(kernel))
    return graph.forward


COMPILED: list[str] = []


class AttentionByHead(nn.Module):
    """Attention whose kernel computes something else for each head, from tables that the code keeps.

    Args:
        kernel: ``"slopes"`` for FlashAttention with slopes, ``"scores"`` for FlexAttention with a function of the
            head's index that reads a parameter and a constant, ``"number"`` for one that reads how many heads there
            are, as the code around it does, ``"mask"`` for FlexAttention with a window of another length for each head,
            ``"compiled scores"`` and ``"compiled mask"`` for these compiled, ``"dropout"`` for
            FlashAttention with dropout.
    """

    features = 4
    again: ClassVar[dict[str, Any]] = {}

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel, self.heads = kernel, 12
        width = self.heads * self.features
        self.q, self.k, self.v = (nn.Linear(width, width // groups, bias=False) for groups in (1, 2, 2))
        self.o = nn.Linear(width, width, bias=False)
        self.slopes = 2.0 ** -torch.arange(1.0, self.heads + 1)
        self.bias = nn.Parameter(torch.randn(self.heads, 23)) if "scores" in kernel else None

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        if self.kernel == "number":
            q = self.q(x).unflatten(-1, (self.heads, -1))
            k, v = (layer(x).unflatten(-1, (self.heads // 2, -1)) for layer in (self.k, self.v))
        else:
            q, k, v = (layer(x).unflatten(-1, (-1, self.features)) for layer in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[batch, seq, heads, features]``."""
        if self.kernel == "slopes":
            return sys.modules["flash_attn"].flash_attn_func(q, k, v, causal=True, alibi_slopes=self.slopes)
        if self.kernel == "dropout":
            flash = sys.modules["flash_attn"].flash_attn_func
            options = {"dropout_p": 0.5 if self.training else 0.0, "causal": True}
            return (
                checkpoint(flash, q, k, v, **options, use_reentrant=False) if self.again else flash(q, k, v, **options)
            )

        def score(score: Tensor, b: Tensor, h: Tensor, s: Tensor, t: Tensor) -> Tensor:
            return score - self.slopes[h] * (s - t).abs() + self.bias[h, (s - t).abs()]

        def number(score: Tensor, b: Tensor, h: Tensor, s: Tensor, t: Tensor) -> Tensor:
            return score - torch.exp2(-8 * (h + 1) / self.heads) * (s - t).abs()

        windows = torch.arange(2, 2 * self.heads + 2, 2)

        def mask(b: Tensor, h: Tensor, s: Tensor, t: Tensor) -> Tensor:
            return (s >= t) & (s - t < windows[h])

        flex = flex_attention.flex_attention
        if self.kernel.startswith("compiled"):
            flex = torch.compile(flex, backend=compiled_alone)
        if "scores" in self.kernel:
            option: dict[str, Any] = {"score_mod": score}
        elif self.kernel == "number":
            option = {"score_mod": number}
        else:
            rows, length = q.shape[:2]
            made = flex_attention.create_block_mask(mask, rows, self.heads, length, length, "cpu", BLOCK_SIZE=8)
            option = {"block_mask": made}
        return flex(*(x.transpose(1, 2) for x in (q, k, v)), **option, enable_gqa=True).transpose(1, 2)


def train_by_head(kernels: tuple[str, ...]) -> dict[tuple[str, str, str], Found]:
    """As :func:`train_families`, with kernels that compute something else for each head."""
    found = {}
    x = torch.randn(2, 23, 48, generator=torch.Generator().manual_seed(0))
    torch.compiler.set_stance("default")  # otherwise FlexAttention does not see what the function reads
    for kernel in kernels:
        torch.manual_seed(1)
        whole = AttentionByHead(kernel)
        model = copy.deepcopy(whole)
        parallelize(model, dist.group.WORLD, example_inputs=x)  # type: ignore[arg-type]
        for one in (whole, model):
            one(x).square().mean().backward()
        gradients = full_gradients(model)
        far = max(float((gradients[name] - p.grad).abs().max()) for name, p in whole.named_parameters())
        cut = [str(parameter.layout) for parameter in model.autotp.plan.parameters if parameter.names[0] != "bias"]
        assert all(layout.startswith("S(") for layout in cut), cut
        found["by head", kernel, "plain"] = model.autotp.plan.communication, far, 0.0
    torch.compiler.set_stance("force_eager")
    assert set(COMPILED) == {"flex_attention"}
    return found


def draw_by_head(rank: int, size: int) -> dict[str, Any]:
    """What a kernel that drops gives on a rank, also when activations are computed again, and in evaluation."""
    with_kernels()
    torch.manual_seed(1)
    whole = AttentionByHead("dropout")
    with torch.no_grad():  # all pairs of heads are alike, but for what they drop
        for layer in (whole.q, whole.k, whole.v, whole.o):
            layer.weight.copy_(torch.eye(4).repeat(layer.out_features // 4, 12) / 12)
    x = torch.ones(2, 23, 48)
    found: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "again": {"use_reentrant": False},
        "reentrant": {"use_reentrant": True},
    }
    for way, again in ways.items():
        model = copy.deepcopy(whole).train()
        model.again = again  # type: ignore[misc]
        parallelize(model, dist.group.WORLD, example_inputs=x)  # type: ignore[arg-type]
        torch.manual_seed(7)
        model(x).square().mean().backward()
        found[way] = torch.get_rng_state(), model.v.weight.grad
        model.eval()
        with torch.no_grad():
            found["evaluated"] = float((model(x) - whole.eval()(x)).abs().max())
    return found


def train_heads(heads: dict[tuple[int, int], tuple[str, ...]]) -> dict[tuple[str, str, str], Found]:
    """As :func:`train_families`, with numbers of heads with which kernels are called otherwise on some of the ranks.

    transformers repeats key/value heads for FlexAttention where the query heads are no power of two.
    """
    found = {}
    for (queries, keys), kernels in heads.items():
        sizes = {"num_attention_heads": queries, "num_key_value_heads": keys, "hidden_size": 16 * queries}
        for attention in ("sdpa", *kernels):
            trained_so = trained("llama", attention, batches()["plain"], num_hidden_layers=1, **sizes)
            found[f"llama with {queries}/{keys} heads", attention, "plain"] = trained_so
    return found


def train_families(
    rank: int, size: int, families: tuple[str, ...], sizes: dict[str, int], cells: Cells
) -> dict[tuple[str, str, str], Found]:
    with_kernels()
    found = train_by_head(cells.by_head) | train_heads(cells.heads)
    # Before the kernel has been tried.
    found["llama", FLASH_2, "again"] = trained("llama", FLASH_2, batches()["plain"], again=True, **sizes)
    for family in families:
        for attention in ("sdpa", *cells.plain, *(OTHER_NAMES if family == "llama" else ())):
            found[family, attention, "plain"] = trained(family, attention, batches()["plain"], **sizes)
    # One head of queries on each rank: it needs no groups of them, which change the call in one of two kinds of layers.
    found["cohere2", "sdpa", "one head"] = trained(
        "cohere2", "sdpa", batches()["plain"], num_attention_heads=size, num_key_value_heads=1, hidden_size=48,
        layer_types=["sliding_attention", "full_attention"], sliding_window=8,
    )  # fmt: skip
    for kind, understanding in cells.packed.items():
        for attention in understanding:
            batch = batches()[kind]
            if (attention, kind) == ("flex_attention", "documents"):
                batch = {**batch, "attention_mask": block_mask()}
            found["llama", attention, kind] = trained("llama", attention, batch, **sizes)
    return found


UNEVEN = {"num_hidden_layers": 1, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
"""Of two ranks one has two key/value heads, for which it repeats them, and the other one."""


def on_both(rank: int, size: int, cells: Cells) -> dict[str, Any]:
    """What all tests of two ranks look at, from one start."""
    return {"families": train_families(rank, size, ("llama",), UNEVEN, cells), **draw_by_head(rank, size)}


@lru_cache
def on_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_both, 2, SOME)


def test_every_kernel_is_divided_as_plain_attention_is() -> None:
    """Also where ranks call one in other ways: one has as few query heads as it takes groups of, or one head alone."""
    for found in on_two_ranks():
        compare_with_sdpa(found["families"])


@pytest.mark.nightly
def test_every_kernel_is_divided_so_with_all_batches_and_heads() -> None:
    for found in run_ranks(train_families, 2, ("llama",), UNEVEN, EVERY):
        compare_with_sdpa(found)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_kernel_of_every_family_is_divided_as_plain_attention_is(ranks: int) -> None:
    cells = replace(EVERY, heads=dict.fromkeys([(12, 4), (8, 1), (6, 3)], KERNELS))
    for found in run_ranks(train_families, ranks, FAMILIES, {}, cells):
        compare_with_sdpa(found)


ALIKE = {"lengths": "packed", "documents": "packed", "padded": "plain", "again": "plain"}
"""Batches that are as long as others: plain attention is divided for them as for those."""


def compare_with_sdpa(found: dict[tuple[str, str, str], Found]) -> None:
    for (family, attention, batch), (communication, far, loss) in found.items():
        assert far < 1e-6, (family, attention, batch)
        if family != "by head":
            assert communication == found[family, "sdpa", ALIKE.get(batch, batch)][0], (family, attention, batch)
        if batch in ("packed", "lengths", "documents"):
            assert abs(loss - found[family, "sdpa", "packed"][2]) < 1e-5, (attention, batch, "not these sequences")


def test_each_rank_drops_in_a_kernel_what_it_draws_itself() -> None:
    """Heads stay divided with dropout in a kernel; the ranks' common numbers go on alike."""
    one, other = on_two_ranks()
    states = [rank[how][0] for rank in (one, other) for how in ("plain", "again", "reentrant")]
    assert all(torch.equal(states[0], state) for state in states)
    assert not torch.equal(one["plain"][1], other["plain"][1]), "all heads would be dropped from alike"
    for rank in (one, other):
        for how in ("again", "reentrant"):
            assert torch.equal(rank["plain"][1], rank[how][1]), f"what is computed again draws the same: {how}"
        assert rank["evaluated"] < 1e-6
