"""An embedding whose rows (the vocabulary) are cut over the ranks.

With a table ``E [vocab, hidden]`` of which rank ``r`` has the rows ``E_r``:

* forward: ``y = sum_r lookup_r``, where ``lookup_r`` has ``E[id]`` where this rank owns ``id`` and zeros elsewhere;
* weight gradient: ``dE_r[row] = sum of dy over the tokens with that id``, without communication.

The sum over the ranks is exact: for every token all ranks but one add zeros. (After Megatron-LM's
``VocabParallelEmbedding``; here the vocabulary is any ownership map, and an id out of it is an error.)
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.capture import recording
from lightning_autotp.layouts.ownership import Ownership, owner_of
from lightning_autotp.layouts.plan import ImplementationPlan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel.collectives import all_reduce, owner_rows
from lightning_autotp.parallel.layer_runs import NotesRuns
from lightning_autotp.parallel.local_parameters import LocalParameters, become, localize_parameter, take_parts
from lightning_autotp.private.torch_private import assert_async, has_values
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.implementations import DEFERRED_SUM, Implementation

_Embedding = TypeVar("_Embedding", bound="VocabParallelEmbedding")


def local_positions(indices: Tensor, ownership: Ownership, rank: int) -> tuple[Tensor, Tensor]:
    """Where global indices lie in ``rank``'s part.

    Returns:
        Their local positions (0 for those elsewhere), and which of them are this rank's. An index that several ranks
        hold is its first owner's, so that it counts once in a sum over the ranks.
    """
    positions = torch.zeros_like(indices)
    mine = torch.zeros_like(indices, dtype=torch.bool)
    offset = 0
    for start, stop, ranks in owner_rows(ownership):
        if rank == owner_of(ranks):
            here = (indices >= start) & (indices < stop)
            positions = torch.where(here, indices - start + offset, positions)
            mine = mine | here
        if rank in ranks:
            offset += stop - start
    return positions, mine


def check_indices(indices: Tensor, valid: Tensor, message: str) -> None:
    """Raise, on every rank alike, if some index is not valid.

    On an accelerator (and in compiled code) the check is an assertion on the device, as PyTorch's own are there: asking
    for the answer would make the host wait.

    Raises:
        IndexError: with ``message`` and the first bad index.
    """
    if valid.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(valid.all()):
            raise IndexError(f"{message}; found {indices[~valid].flatten()[0].item()}")
    else:
        assert_async(valid.all(), message)


def vocab_parallel_lookup(
    ids: Tensor, weight: Tensor, ownership: Ownership, rank: int, padding_idx: int | None = None
) -> Tensor:
    """This rank's addend of an embedding: its own rows, and zeros for the ids of other ranks. Not collective.

    Args:
        ids: whole-vocabulary ids, ``[...]``, the same on every rank.
        weight: this rank's rows, ``[vocab/tp, hidden]``.
        ownership: which rows each rank has.
        rank: this process's rank in the map.
        padding_idx: an id that contributes nothing to the gradient.

    Returns:
        ``[..., hidden]`` of type Partial.

    Raises:
        IndexError: for an id out of the vocabulary (on an accelerator: an assertion on the device).
    """
    if not has_values(weight):
        return recording.record(VOCAB.primitive, [weight, ids], (*ids.shape, weight.shape[1]), ownership.digest)
    check_indices(
        ids,
        (ids >= 0) & (ids < ownership.size),
        f"token ids must be in [0, {ownership.size}), the embedding's vocabulary",
    )
    positions, mine = local_positions(ids, ownership, rank)
    padding = None
    if padding_idx is not None:
        runs = ownership.held[rank]
        if any(start <= padding_idx < stop for start, stop in runs):
            padding = sum(max(0, min(stop, padding_idx) - start) for start, stop in runs)
    # A rank without rows looks up a row of zeros, so that its weight too has a gradient (of no elements).
    rows = weight if weight.shape[0] else F.pad(weight, (0, 0, 0, 1))
    return F.embedding(positions, rows, padding).masked_fill(~mine.unsqueeze(-1), 0)


class VocabParallelEmbedding(nn.Embedding, NotesRuns):
    """An embedding of which every rank has some rows.

    ================  ======================================================  ===========================
    tensor            shape on a rank                                         type
    ================  ======================================================  ===========================
    ids               ``[batch, ...]`` integers                               Invariant
    weight            ``[vocab/tp, hidden]``                                  Shard(0)
    output            ``[batch, ..., hidden]``                                Invariant
    .                 ``[batch, ..., hidden]`` (not ``reduce_output``)        Partial
    ================  ======================================================  ===========================

    The forward is collective (an all-reduce) unless ``reduce_output=False``; the backward is not.

    Args:
        num_embeddings: size of the whole vocabulary.
        embedding_dim: hidden size.
        ownership: which rows each rank has.
        group: the tensor-parallel group.
        padding_idx: an id that contributes nothing to the gradient, as in ``nn.Embedding``.
        reduce_output: ``False`` leaves the sum to the caller.
        device: where to make the (empty) weight.
        dtype: its dtype.

    Example:
        >>> group = TPGroup(name="", rank=0, size=2)  # without a process group: layers on meta only
        >>> layer = VocabParallelEmbedding(131, 16, Ownership.even(131, group.size), group, device="meta")
        >>> layer
        VocabParallelEmbedding(131 -> 66, 16)
        >>> layer(torch.empty(2, 5, dtype=torch.long, device="meta")).shape
        torch.Size([2, 5, 16])
    """

    ownership: Ownership
    group: TPGroup
    reduce_output: bool

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        ownership: Ownership,
        group: TPGroup,
        *,
        padding_idx: int | None = None,
        reduce_output: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device="meta", dtype=dtype)
        self._divide(ownership, group, reduce_output)
        self.to_empty(device=device or torch.get_default_device())

    @classmethod
    def convert(
        cls: type[_Embedding],
        embedding: nn.Embedding,
        ownership: Ownership,
        group: TPGroup,
        *,
        reduce_output: bool = True,
        local: LocalParameters | None = None,
    ) -> _Embedding:
        """Make an existing embedding (on meta or with values) vocabulary-parallel, in place. Not collective.

        Args:
            embedding: the embedding; its hooks stay, and a subclass keeps a forward that calls ``super().forward``.
            ownership: which rows each rank has.
            group: the tensor-parallel group.
            reduce_output: see the class.
            local: see :func:`~lightning_autotp.parallel.local_parameters.localize_parameter`.

        Returns:
            ``embedding`` itself.

        Raises:
            TypeError: if it is not a convertible ``nn.Embedding``.
            ValueError: if the map does not fit, or for ``max_norm``, ``scale_grad_by_freq`` or ``sparse``.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option, None):
                raise ValueError(
                    f"an embedding with {option} cannot be cut over its vocabulary: turn it off, or leave it replicated"
                )
        layer = become(embedding, cls, nn.Embedding)
        layer._divide(ownership, group, reduce_output, local)
        return layer

    def _divide(
        self, ownership: Ownership, group: TPGroup, reduce_output: bool, local: LocalParameters | None = None
    ) -> None:
        localize_parameter(self, "weight", 0, ownership, group, local)
        self.ownership, self.group, self.reduce_output = ownership, group, reduce_output

    def reset_parameters(self) -> None:
        """Fill in this rank's part of what ``nn.Embedding`` would draw with the same seed, by drawing all of it."""
        like = self.weight
        if not like.is_meta:
            sizes = self.num_embeddings, self.embedding_dim, self.padding_idx
            whole = nn.Embedding(*sizes, device=like.device, dtype=like.dtype)
            take_parts(self, whole, 0, self.ownership, self.group)

    def forward(self, input: Tensor) -> Tensor:
        """``[batch, ...] -> [batch, ..., hidden]``. Collective unless ``reduce_output=False``."""
        self.note_run()
        output = vocab_parallel_lookup(input, self.weight, self.ownership, self.group.rank, self.padding_idx)
        return all_reduce(output, self.group) if self.reduce_output else output

    def extra_repr(self) -> str:
        """What ``repr`` shows: whole and local sizes."""
        text = f"{self.num_embeddings} -> {self.ownership.local_size(self.group.rank)}, {self.embedding_dim}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        return text + ("" if self.reduce_output else ", reduce_output=False")


def _build(
    module: nn.Embedding,
    use: ImplementationPlan,
    layout: Shard,
    group: TPGroup,
    local: LocalParameters,
) -> None:
    (_, ownership), *_ = layout.dims
    VocabParallelEmbedding.convert(module, ownership, group, local=local, reduce_output=use.output != DEFERRED_SUM)


VOCAB = Implementation(
    name="vocab",
    operator="aten.embedding.default",
    layer="Embedding",
    operand="weight",
    dims=(0,),
    outputs=(("P", "I"), DEFERRED_SUM),
    bypassable_result=True,
    primitive="vocab_parallel_lookup",
    reads=("weight", "indices"),
    build=_build,
)
