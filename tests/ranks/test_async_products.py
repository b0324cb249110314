"""Asynchronous tensor parallelism: torch's pass recognizes what blocks compile to; errors where it cannot be had."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import tiny_model, token_batch
from torch import fx, nn
from torch.distributed import _symmetric_memory

from lightning_autotp import AutoTPStrategy, full_gradients, parallelize
from lightning_autotp.parallel.async_products import AsyncTensorParallelError, ProductReport
from lightning_autotp.private.distributed_private import FusedProducts
from lightning_autotp.ranks.agreement import PeerError


def fused(rank: int, size: int, rows: int) -> dict[str, Any]:
    """What torch's pass makes of a compiled block's graphs, were the ranks' memory shared: it changes copies here."""
    from torch._inductor import config
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

    counted: list[tuple[int, int]] = []

    def look(graph: fx.Graph) -> None:
        copy, places = fx.Graph(), {}
        copy.output(copy.graph_copy(graph, places))
        shared = mock.patch.object(_symmetric_memory, "_is_test_mode", True)
        with shared, mock.patch.object(dist, "is_nccl_available", return_value=True):
            micro_pipeline_tp_pass(copy)
        seen = FusedProducts.__new__(FusedProducts)
        seen.gathered = seen.scattered = seen.graphs = 0
        seen.look_at(copy)
        counted.append((seen.gathered, seen.scattered))

    before = config._micro_pipeline_tp, config.post_grad_custom_post_pass
    ended, counting = FusedProducts(), FusedProducts()
    ended.end()  # which leaves it on for the other
    turned_on = config._micro_pipeline_tp
    config.post_grad_custom_post_pass = [*config.post_grad_custom_post_pass, look]
    model = parallelize(
        tiny_model("llama", num_hidden_layers=1),
        dist.group.WORLD,  # type: ignore[arg-type]
        sequence_parallel=True,
    )
    for block in model.model.layers:  # type: ignore[union-attr]
        block.compile(fullgraph=True)
    batch = token_batch(3, rows, 16)
    for _ in range(2):  # the first call is not compiled
        model.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    config.post_grad_custom_post_pass = [each for each in config.post_grad_custom_post_pass if each is not look]
    counting.end()
    return {
        "counted": counted,
        "turned on": turned_on,
        "left behind": (config._micro_pipeline_tp, config.post_grad_custom_post_pass) != before,
        "seen": (counting.gathered, counting.scattered, counting.graphs),
        "loss": loss.detach(),
        "gradients": full_gradients(model),
    }


@pytest.mark.nightly
@pytest.mark.parametrize(("rows", "wanted"), [(2, [(5, 2), (2, 0)]), (1, [(0, 2), (2, 0)])])
def test_torch_s_pass_recognizes_a_block(rows: int, wanted: list[tuple[int, int]]) -> None:
    """Forward: of Q, K, V, gate and up, and of both results. Backward: of both results' gradients."""
    whole = tiny_model("llama", num_hidden_layers=1)
    loss = whole(**token_batch(3, rows, 16)).loss
    loss.backward()
    for found in run_ranks(fused, 2, rows):
        assert found["turned on"]
        assert not found["left behind"]
        blocks = [pair for pair in found["counted"] if pair != (0, 0)]
        assert blocks == wanted
        assert found["seen"] == (0, 0, len(found["counted"]))  # nothing is shared here, so nothing is fused
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-5, atol=0)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(found["gradients"][name], parameter.grad, rtol=1e-4, atol=1e-6)


def refused(rank: int, size: int) -> tuple[str, str, bool]:
    model = tiny_model("llama", num_hidden_layers=1)
    try:
        parallelize(model, dist.group.WORLD, sequence_parallel=True, async_tensor_parallel=True)  # type: ignore[arg-type]
    except Exception as error:
        return type(error).__name__, str(error), hasattr(model, "autotp")
    raise AssertionError


def test_without_shared_memory_it_is_an_error_on_every_rank() -> None:
    for kind, text, changed in run_ranks(refused, 2):
        assert kind in {AsyncTensorParallelError.__name__, PeerError.__name__}
        assert "devices that share memory, and there is no CUDA device. Run on CUDA devices" in text
        assert not changed


def test_it_needs_sharded_tokens() -> None:
    with pytest.raises(ValueError, match="set sequence_parallel=True as well"):
        AutoTPStrategy(async_tensor_parallel=True)


def test_it_needs_compiled_blocks_and_says_what_overlaps(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    counts = FusedProducts.__new__(FusedProducts)
    counts.gathered, counts.scattered, counts.graphs = 5, 2, 3
    model.register_forward_pre_hook(ProductReport(counts))
    x = torch.ones(1, 2)
    model.eval()(x)
    with pytest.raises(AsyncTensorParallelError, match=r"nothing of the Sequential is compiled.*block.compile"):
        model.train()(x)
    model[0].compile(backend="eager")
    with mock.patch.object(dist, "get_rank", return_value=0):
        for _ in range(2):
            model(x)
            assert capsys.readouterr().out == ""
        model(x)
        model(x)
    assert capsys.readouterr().out == (
        "lightning_autotp: 5 products overlap with the gather of their operand and 2 with the reduce-scatter of their"
        " result, in 3 compiled graphs\n"
    )
