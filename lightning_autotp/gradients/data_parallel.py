"""Tensor parallelism times data parallelism: FSDP2 cuts a parallel model's parameters again, over the data axis.

It is PyTorch's own engine (``torch.distributed.fsdp.fully_shard``), applied to each repeated block, to a large
embedding, and then to the model. To FSDP2 a rank's tensor-parallel part is an ordinary parameter: its rows are sharded
over the copies, gathered before the block runs, and its gradients come back averaged over the copies. The cut is made
while the parameters are on meta, so that no rank ever has its whole tensor-parallel part in memory.

In a forward pass a block's gather begins before the operators of the block before it (:func:`gather_ahead`). FSDP2
itself begins it when the host comes to the block, which is too late where the host waits for the device inside of a
block, as for how many tokens chose an expert. In a backward pass FSDP2 itself begins it as early, in the order in which
the blocks ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_autotp.building.repeated_blocks import blocks_of_their_own
from lightning_autotp.gradients.sums import hook_gradient
from lightning_autotp.parallel.embedding import VocabParallelEmbedding
from lightning_autotp.parallel.head import VocabParallelHead
from lightning_autotp.parallel.head_product import compute_undone
from lightning_autotp.parallel.logits import VocabParallelLogits
from lightning_autotp.parameters.local_blocks import fsdp_modules, is_cut, is_offloaded, plain, reshard
from lightning_autotp.parameters.state import is_parallel, parallel_state
from lightning_autotp.private.distributed_private import is_gathered_ahead
from lightning_autotp.private.torch_private import accumulated_hooks, after_backward, tree_leaves
from lightning_autotp.private.transformers_private import WAITS_FOR_COPIES
from lightning_autotp.ranks.agreement import gather_objects


def shard_over_data(
    model: nn.Module,
    mesh: DeviceMesh,
    lowered: Collection[str] = (),
    dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> frozenset[str]:
    """Cut the parameters of a local model over the data axis, in place; those on meta stay there.

    What is gathered together has one dtype, and is gathered in one: parameters that have another than most of their
    block are gathered when the module that they belong to is called. Gradients in 16 bits are averaged in float32.

    Scalars cannot be cut, nor parameters in another dtype that no call of a module of their own would gather: they stay
    on every rank, and :func:`~lightning_autotp.gradients.sums.average_gradients` averages their gradients. Weights that
    are to be quantized stay, too: they have no gradients.

    Args:
        model: a model whose parameters are its tensor-parallel part.
        mesh: the data-parallel ranks, which hold the same tensor-parallel part; of two dims, the last one shards.
        lowered: names of parameters that may be gathered in 16 bits. Those in no block are gathered as they are stored,
            and so are those whose gradients the tensor-parallel ranks sum.
        dtype: these 16 bits.
        cpu_offload: whether what is cut is in host memory, and on the device while it is gathered.

    Returns:
        The names of those that are gathered in 16 bits.
    """
    state = parallel_state(model)
    state.cpu_offload = cpu_offload
    memory = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    summed = {place.parameter for place in state.places(model) if place.meta.grad_sync}
    names = {parameter: name for name, parameter in model.named_parameters() if name in lowered}
    low, done = names.keys() - summed, frozenset[str]()
    stays = {place.parameter for place in state.places(model) if place.meta.format is not None}
    stays |= {parameter for parameter in model.parameters() if parameter.dim() == 0}
    # Before FSDP2's own hook on what the model returns. The other weights in no block are gathered from the model's
    # forward to the end of its backward pass.
    model.register_forward_hook(compute_while_gathered, prepend=True)
    embeddings = list(embeddings_of_their_own(model))
    for block in [*blocks_of_their_own(model), *embeddings, model]:
        for module, gathered in _gathered_together(block, stays, low if block is not model else set()):
            for head in module.modules() if module is not model else ():
                if isinstance(head, VocabParallelHead):
                    head.compute_at_once()  # its weight is gathered for this module's forward
            trained = {parameter.dtype for parameter in gathered if parameter.requires_grad}
            is_low = block is not model and bool(gathered) and gathered <= low
            sums = torch.float32 if is_low or any(each.itemsize == 2 for each in trained) else None
            policy = MixedPrecisionPolicy(dtype if is_low else None, sums, cast_forward_inputs=False)
            if is_low:
                done |= {names[parameter] for parameter in gathered}
            others = {*module.parameters()} - gathered
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=memory, ignored_params=others)
            if module in embeddings:
                cast(FSDPModule, module).set_unshard_in_backward(False)
    state.ahead = _next_to_each_other(model)
    return done


def _next_to_each_other(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    blocks = set(blocks_of_their_own(model))
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential))
    in_order = ([child for child in each.children() if child in blocks] for each in lists)
    return [pair for members in in_order for pair in pairwise(members)]


def gather_ahead(model: nn.Module) -> None:
    """From now on FSDP2 begins to gather a repeated block when the block before it in their list does. Not collective.

    It is for a forward pass: a backward pass that computes blocks again goes the other way.
    """
    for block, following in parallel_state(model).ahead:
        cast(FSDPModule, block).set_modules_to_forward_prefetch([cast(FSDPModule, following)])


def gather_when_called(model: nn.Module) -> None:
    """FSDP2 begins to gather a block when it is called, until :func:`gather_ahead`. Not collective.

    What it has begun to gather of a block that did not run after all (code left it out, or runs blocks in another
    order) is dropped: it would serve the block's next call, with weights of before a step. The block is not gathered
    ahead any more.
    """
    state = parallel_state(model)
    done = []
    for block, following in state.ahead:
        cast(FSDPModule, block).set_modules_to_forward_prefetch([])
        if is_gathered_ahead(cast(FSDPModule, following)):
            cast(FSDPModule, following).unshard()  # waits for what was begun
            cast(FSDPModule, following).reshard()
        else:
            done.append((block, following))
    state.ahead = done


def embeddings_of_their_own(model: nn.Module) -> Iterator[VocabParallelEmbedding]:
    """The embeddings in no repeated block that FSDP2 gathers only while they look up rows, not until the backward pass.

    Each has at least a quarter of what is in no block, and shares its rows with nothing: what a tied head multiplies
    is needed for the loss. They are parallel layers as they are: it is certain that code calls them, and that their
    backward pass does not read the rows.
    """
    uses = Counter[Tensor](each for module in model.modules() for each in module.parameters(recurse=False))
    inside = {parameter for block in blocks_of_their_own(model) for parameter in block.parameters()}
    outside = sum(parameter.nbytes for parameter in uses if parameter not in inside)
    lookups = [module for module in model.modules() if type(module) is VocabParallelEmbedding]
    for embedding in lookups:
        weight = embedding.weight
        if uses[weight] == 1 and weight not in inside and 4 * weight.nbytes >= outside:
            yield embedding


def _gathered_together(
    block: nn.Module, stays: set[nn.Parameter], low: set[nn.Parameter]
) -> list[tuple[nn.Module, set[nn.Parameter]]]:
    """The parameters of a block that are not cut yet, by the module whose call gathers them; the block comes last.

    Those that are trained have one dtype, for their gradients are averaged together. Where most of the block is in
    ``low``, all that its call gathers is. A module's own parameters are gathered by one call, so they are low all
    together or not at all. What cannot be gathered so is added to ``stays``.
    """
    holding: dict[nn.Parameter, list[nn.Module]] = {}
    for module in block.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if parameter not in stays]
        if module is not block and not low.issuperset(own):
            low = low.difference(own)
        for parameter in own:
            if not is_cut(parameter):
                holding.setdefault(parameter, []).append(module)

    def most(parameters: Iterable[nn.Parameter], kind: Callable[[nn.Parameter], Any]) -> Any:
        sizes: Counter[Any] = Counter()
        for parameter in parameters:
            sizes[kind(parameter)] += parameter.numel()
        return max(sizes, key=sizes.__getitem__, default=None)

    is_low = most(holding, low.__contains__)
    alike = [parameter for parameter in holding if parameter in low or not is_low]
    dtype = most((parameter for parameter in alike if parameter.requires_grad), attrgetter("dtype"))
    here = {parameter for parameter in alike if parameter.dtype == dtype or not parameter.requires_grad}
    apart: dict[nn.Module, set[nn.Parameter]] = {}
    for parameter in (parameter for parameter in holding if parameter not in here):
        module, *others = holding[parameter]
        beside = apart.get(module, set())
        is_alike = all(x.dtype == parameter.dtype and (x in low) == (parameter in low) for x in beside)
        if is_alike and not others and module is not block and _is_called_for_its_own(module):
            apart[module] = beside | {parameter}
        else:
            stays.add(parameter)
    return [*apart.items(), (block, here)]


def _is_called_for_its_own(module: nn.Module) -> bool:
    """Whether a module has a forward, and all of its parameters itself: FSDP2 cuts nothing below one that it gathers.

    A module that only holds parameters is never called.
    """
    is_called = type(module).forward is not nn.Module.forward
    return is_called and {*module.parameters()} == {*module.parameters(recurse=False)}


@torch.compiler.disable  # hooks on tensors, which dynamo fails to inline
def compute_while_gathered(model: nn.Module, args: Any, output: Any) -> None:
    """Let logits that code still refers to when the backward pass ends be computed then."""

    def end() -> None:
        compute_undone(model.parameters())
        if (gathers := parallel_state(model).gathers) is not None:
            gathers.was_backward()

    def in_the_end(grad: Tensor) -> None:
        after_backward(end)

    for result in tree_leaves(output) if torch.is_grad_enabled() else []:
        if not isinstance(result, Tensor) or not result.requires_grad:
            continue
        if isinstance(result, VocabParallelLogits) and result.product is not None:
            result.product.before_backward(in_the_end)
        else:
            result.register_hook(in_the_end)


def hook_gathered(model: nn.Module) -> None:
    """Let the tensor-parallel gradient sums act on what FSDP2 gathers, before it averages over the copies.

    Collective over the data axis: every group of parameters with such sums is gathered once, one after the other. The
    gathered parameters are the same objects from then on.
    """
    state = parallel_state(model)
    summed = [name for name in state.gradient_sums if is_cut(model.get_parameter(name))]
    for path, module in list(model.named_modules()):
        inside = [name for name in summed if name.startswith(f"{path}." if path else "")]
        if inside and isinstance(module, FSDPModule):
            module.unshard()  # its own: those of modules in it that are gathered when they are called stay cut
            for name in inside:
                if not is_cut(model.get_parameter(name)):
                    hook_gradient(model.get_parameter(name), state.gradient_sums[name])
            module.reshard()


def beside_fsdp(gradient: Tensor) -> Tensor:
    """A hook for gradients on their way to parameters that FSDP2 has cut, past FSDP2. Not collective.

    Raises:
        RuntimeError: where second derivatives are wanted, which do not go through DTensors.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "second derivatives (create_graph=True) do not go through parameters that FSDP2 has sharded: train with one"
            " copy of the model (data_parallel_size=1, no data_mesh)"
        )
    # FSDP2 adds to the same gradients on a stream of its own.
    torch.get_device_module(gradient.device).synchronize()
    return gradient


def after_fsdp(parameter: Tensor) -> Tensor:
    """A parameter whose gradients past FSDP2 are added when the backward pass ends; itself, if it is not offloaded.

    What is in host memory gets such a gradient in the host's thread of the backward pass, and FSDP2 writes to the same
    ``.grad`` in that of the device.
    """
    is_late = is_offloaded(parameter) and parameter.requires_grad and torch.is_grad_enabled()
    return _AfterFSDP.apply(parameter) if is_late else parameter


class _AfterFSDP(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        after_backward(partial(_add_gradient, ctx.parameter, gradient))


@torch.no_grad()
def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is not None:
        plain(parameter.grad).add_(plain(gradient))
        return
    parameter.grad = gradient.clone()
    for hook in accumulated_hooks(parameter):
        hook(parameter)


def generate_gathered(model: Any, *args: Any, **kwargs: Any) -> Any:
    """``model.generate()``, with the parameters that belong to no block gathered: an encoder runs past the model."""
    in_parts = getattr(model, WAITS_FOR_COPIES)
    if in_parts:
        model.unshard()
    try:
        return type(model).generate(model, *args, **kwargs)
    finally:
        if in_parts:
            model.reshard()


def gather_if_uneven(module: nn.Module, batches: Sequence[float], group: dist.ProcessGroup) -> None:
    """Where the copies have different numbers of batches, or unknown ones, gather the whole model for all of them.

    Collective over ``group``, and none of the forward passes that follow is, until :func:`in_parts_again`. Then every
    rank holds its whole tensor-parallel part. (Training data is shared out evenly; rows to predict are not padded.)

    Args:
        module: a module with models in it that FSDP2 has cut.
        batches: how many this rank has, of each dataloader.
        group: the data-parallel group.
    """
    counts = gather_objects(list(batches), group)
    if any(count != counts[0] for count in counts) or float("inf") in counts[0]:
        _hold(module, True)
        for part in fsdp_modules(module):
            part.unshard()


def in_parts_again(module: nn.Module) -> None:
    """Undo what :func:`gather_if_uneven` may have done."""
    _hold(module, False)
    reshard(module)


def _hold(module: nn.Module, gathered: bool) -> None:
    for part in fsdp_modules(module):
        if is_parallel(part):  # a model, whose own parameters stay gathered until its backward pass
            if hasattr(part, WAITS_FOR_COPIES):
                setattr(part, WAITS_FOR_COPIES, not gathered)
            if (gathers := parallel_state(cast(nn.Module, part)).gathers) is not None:
                gathers.hold(gathered)
        else:
            part.set_reshard_after_forward(not gathered, recurse=False)
