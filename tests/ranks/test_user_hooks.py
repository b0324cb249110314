"""Hooks that are added to a parallel model: what they see and return is as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from called import IDS, made, worst
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from lightning_autotp import checked, parallelize

COLLECTED = {
    "llama": ("self_attn.q_proj", "self_attn.v_proj", "mlp.act_fn", "mlp.down_proj", "input_layernorm"),
    "mixtral": ("self_attn.k_proj", "mlp.gate", "post_attention_layernorm", "mlp"),
    "gpt2": ("attn.c_attn", "mlp.c_fc", "mlp.act", "ln_1"),
}


def layers(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def first_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else first_tensor(value[0])


def collect(model: Any, paths: tuple[str, ...]) -> tuple[list[Tensor], list[Any]]:
    """Let hooks collect what modules give and take."""
    seen: list[Tensor] = []
    handles: list[Any] = []
    for path in paths:
        module = layers(model)[0].get_submodule(path)
        handles.append(module.register_forward_hook(lambda m, args, output: seen.append(first_tensor(output))))
        handles.append(module.register_forward_pre_hook(lambda m, args: seen.extend(map(first_tensor, args[:1]))))
        handles.append(
            module.register_forward_hook(
                lambda m, args, kwargs, output: seen.append(first_tensor(output) * 2), with_kwargs=True
            )
        )
    return seen, handles


def collecting(model: Any, reference: Any, family: str) -> None:
    """A loss on activations that hooks collect."""
    model(input_ids=IDS, labels=IDS)
    losses = []
    for each in (model, reference):
        each.train()
        seen, handles = collect(each, COLLECTED[family])
        loss = each(input_ids=IDS, labels=IDS).loss
        shapes = [tuple(tensor.shape) for tensor in seen]
        loss = loss + sum(tensor.pow(2).mean() + tensor.flatten()[0] for tensor in seen)
        loss.backward()
        losses.append((loss.detach(), shapes))
        for handle in handles:
            handle.remove()
    assert losses[0][1] == losses[1][1], family
    assert torch.allclose(losses[0][0], losses[1][0], rtol=1e-5), (family, losses)
    assert worst(model, reference) < 2e-5, (family, worst(model, reference))
    as_before(model, reference)


def as_before(model: Any, reference: Any) -> None:
    """A step without anything that was added."""
    for each in (model, reference):
        each.zero_grad()
        each(input_ids=IDS, labels=IDS).loss.backward()
    assert worst(model, reference) < 2e-5
    for each in (model, reference):
        each.zero_grad()


def adapter(module: nn.Module, seed: int) -> nn.ParameterList:
    """Adds ``B(A(x))`` to a layer's output by a hook."""
    generator = torch.Generator().manual_seed(seed)
    inner = nn.Parameter(torch.randn(4, module.in_features, generator=generator) * 0.1)  # type: ignore[arg-type]
    outer = nn.Parameter(torch.randn(module.out_features, 4, generator=generator) * 0.1)  # type: ignore[arg-type]
    module.register_forward_hook(lambda m, args, output: output + args[0] @ inner.t() @ outer.t())
    module.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
    return nn.ParameterList([inner, outer])


def adapting(rank: int, size: int) -> None:
    reference, model = made("llama"), made("llama")
    parallelize(model, dist.group.WORLD)
    added, losses = [], []
    for each in (model, reference):
        each.train()
        own = [
            adapter(layers(each)[0].get_submodule(path), seed)
            for seed, path in enumerate(("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"))
        ]
        loss = each(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.detach())
        added.append([parameter.grad for pair in own for parameter in pair])
    assert torch.allclose(*losses, rtol=1e-5)
    for ours, theirs in zip(*added, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert worst(model, reference) < 2e-5


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_adapters_by_hooks_are_as_in_one_process(size: int) -> None:
    run_ranks(adapting, size)


def refused(model: Any) -> None:
    """Hooks that cannot see whole tensors are errors."""
    layer = layers(model)[0]
    handle = layer.self_attn.q_proj.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"q_proj has a backward hook"):
        model(input_ids=IDS)
    handle.remove()
    model(input_ids=IDS)
    handle = layer.self_attn.register_forward_pre_hook(lambda *_: None, prepend=True)
    with pytest.raises(RuntimeError, match=r"prepend=True"):
        model(input_ids=IDS)
    handle.remove()
    model(input_ids=IDS)
    for of_all_modules in (register_module_forward_hook, register_module_full_backward_hook):
        handle = of_all_modules(lambda *_: None)
        with pytest.raises(RuntimeError, match=r"a hook on all modules of the process \(test_user_hooks\..*lambda>\)"):
            model(input_ids=IDS)
        handle.remove()
        model(input_ids=IDS)
    handle = register_module_forward_hook(lambda *_: None)  # there already when a model is divided
    other = made("llama")
    parallelize(other, dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"a hook on all modules of the process"):
        other(input_ids=IDS)
    handle.remove()
    other(input_ids=IDS)
    with FlopCounterMode(display=False) as counter:  # has such hooks of torch's own, which tell modules apart
        model(input_ids=IDS)
    assert counter.get_total_flops() > 0


def called_alone(model: Any) -> Tensor:
    """A loss that calls the base model, the embeddings and the head by themselves."""
    table = model.get_input_embeddings()
    base = getattr(model, "model", None) or model.transformer
    prompt = torch.ones(2, 3, table.embedding_dim) * 0.1
    hidden = base(inputs_embeds=torch.cat([prompt, table(IDS)], 1)).last_hidden_state
    logits = model.lm_head(hidden[:, 3:-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
    return loss + hidden.pow(2).mean() + logits[..., 5].mean()


def calls_of_modules(model: Any) -> dict[str, tuple[Any, Any]]:
    """What each module inside is called with, as leaves."""
    calls: dict[str, tuple[Any, Any]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, path=path: calls.setdefault(path, tree_map_only(Tensor, as_leaf, (args, kwargs))),
            with_kwargs=True,
        )
        for path, module in model.named_modules()
        if path
    ]
    model(input_ids=IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


def as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def each_module_alone(model: Any, reference: Any) -> None:
    """Every module, however deep, called with whole tensors, as in one process: what it gives, and all gradients."""
    calls = calls_of_modules(reference.train())
    model.train()
    model(input_ids=IDS, use_cache=False)
    tried = 0
    for path, (args, kwargs) in calls.items():
        given: list[list[Tensor]] = []
        for each in (reference, model):
            each.zero_grad()
            called = copy.deepcopy((args, kwargs))
            result = first_tensor(each.get_submodule(path)(*called[0], **called[1]))
            if result.requires_grad:
                (result * torch.linspace(-1, 1, result.numel()).view_as(result)).mean().backward()
            taken = [leaf for leaf in tree_leaves(called) if isinstance(leaf, Tensor) and leaf.requires_grad]
            given.append([result, *(x.grad if x.grad is not None else torch.zeros(1) for x in taken)])
        for wanted, found in zip(*given, strict=True):
            torch.testing.assert_close(found + 0, wanted, rtol=1e-4, atol=1e-6, msg=lambda m, at=path: f"{at}: {m}")
        if result.requires_grad and any(parameter.grad is not None for parameter in reference.parameters()):
            assert worst(model, reference) < 2e-5, (path, worst(model, reference))
        tried += 1
    assert tried > 10


def layer_alone(model: Any, reference: Any) -> None:
    """A layer that is cut, called in other ways: a hook of the user's on it, with other dims, in the watch."""
    layer, whole = (each.model.layers[0].mlp.up_proj for each in (model, reference))
    x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(3))
    wanted = whole(x)
    seen: list[Tensor] = []
    for _ in range(2):  # that it was called so before leaves nothing in the way
        torch.testing.assert_close(layer(x), wanted)
        seen.clear()
        handle = layer.register_forward_hook(lambda _, args, output: seen.append(output))
        torch.testing.assert_close(layer(x), wanted)
        torch.testing.assert_close(seen[0], wanted)
        model(input_ids=IDS)
        assert seen[1].shape == (*IDS.shape, layer.out_features)
        handle.remove()
    with checked(model):
        torch.testing.assert_close(layer(x), wanted)
    with pytest.raises(RuntimeError, match=r"mlp\.up_proj is called on its own, and what it gives has 2 dims, where"):
        layer(x[0])
    torch.testing.assert_close(layer(x), wanted)
    down, of_down = (each.model.layers[0].mlp.down_proj for each in (model, reference))
    with pytest.raises(RuntimeError, match=r"mlp\.down_proj is called on its own, and what it takes at \[0\]\[0\] has"):
        down(wanted[0])
    torch.testing.assert_close(down(wanted), of_down(wanted))
    torch.testing.assert_close(copy.deepcopy(model).model.layers[0].mlp.up_proj(x), wanted)


def alone(model: Any, reference: Any, family: str) -> None:
    """Modules called on their own, not by the model."""
    losses = []
    for each in (model, reference):
        each.train()
        loss = called_alone(each)
        loss.backward()
        losses.append(loss.detach())
    assert torch.allclose(*losses, rtol=1e-5), (family, losses)
    assert worst(model, reference) < 2e-5, (family, worst(model, reference))
    as_before(model, reference)
    each_module_alone(model, reference)
    if family == "llama":
        layer_alone(model, reference)


def soft_prompt(model: Any, reference: Any, family: str) -> None:
    """Embeddings computed outside of the model, with a parameter of the user's, go into it."""
    gradients = []
    for each in (model, reference):
        each.train()
        each.zero_grad()
        prompt = nn.Parameter(torch.ones(1, 3, each.get_input_embeddings().embedding_dim) * 0.1)
        embeds = torch.cat([prompt.expand(2, -1, -1), each.get_input_embeddings()(IDS)], 1)
        labels = torch.cat([torch.full((2, 3), -100), IDS], 1)
        each(inputs_embeds=embeds, labels=labels).loss.backward()
        gradients.append(prompt.grad)
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7), family
    assert worst(model, reference) < 2e-5, (family, worst(model, reference))


def used_otherwise(rank: int, size: int, families: list[str]) -> None:
    for family in families:
        reference, model = made(family), made(family)
        parallelize(model, dist.group.WORLD)
        for check in (collecting, alone, soft_prompt):
            check(model, reference, family)
        if family == "llama":
            refused(model)


@pytest.mark.parametrize(
    ("size", "families"),
    [
        (2, ["llama", "gpt2"]),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in [(2, ["mixtral"]), (3, ["llama", "mixtral", "gpt2"]), (4, ["gpt2"])]
        ),
    ],
)
def test_activations_that_are_collected_modules_called_by_themselves_and_embeddings_that_are_given(
    size: int, families: list[str]
) -> None:
    """What hooks see, modules give and embeddings take is as in one process; what cannot be is an error."""
    run_ranks(used_otherwise, size, families)
