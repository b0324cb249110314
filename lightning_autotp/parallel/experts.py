"""A mixture's experts of which each rank has some whole.

With experts ``f_e`` of which rank ``r`` has those in ``E_r``, and a token ``x_t`` that chooses ``e_tc``, weighted with
``w_tc``:

* forward: ``y_t = sum_r y_rt``, where ``y_rt = sum over c with e_tc in E_r of w_tc f_e(x_t)``;
* gradients of tokens and weights: each rank has those of its own experts' addends, so over the ranks they are Partial;
* gradients of an expert's parameters: on its rank, without communication.

The module's own code runs, once for all choices of this rank's experts, each as a token of its own with a single
choice. So a rank computes what the tokens choose of its experts, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_autotp.capture import recording
from lightning_autotp.capture.experts import ExpertInputs
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.plan import ImplementationPlan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.operators.graph import EXPERTS
from lightning_autotp.parallel.embedding import check_indices, local_positions
from lightning_autotp.parallel.local_parameters import LocalParameters, localize_parameter
from lightning_autotp.private.torch_private import has_values, parameters_of
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.implementations import DEFERRED_SUM, Implementation


class WholeExperts:
    """The forward of a module with stacked experts, of which this rank has some.

    ================  ==============================  =========
    tensor            shape on a rank                 type
    ================  ==============================  =========
    hidden states     ``[tokens, hidden]``            Replicate
    index             ``[tokens, choices]`` integers  Replicate
    weights           ``[tokens, choices]``           Replicate
    parameters        ``[experts/tp, ...]``           Shard(0)
    output            ``[tokens, hidden]``            Partial
    ================  ==============================  =========

    Not collective: the sum over the ranks is left to what comes after.

    Args:
        module: the module, whose parameters are this rank's already, or will be.
        ownership: which experts each rank has.
        rank: this process's rank in the map.
    """

    def __init__(self, module: nn.Module, ownership: Ownership, rank: int) -> None:
        self.module, self.forward, self.ownership, self.rank = module, module.forward, ownership, rank

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """This rank's addend.

        Raises:
            TypeError: if the arguments are not tokens, the experts that they choose, and weights.
            IndexError: for a choice that is no expert (on an accelerator: an assertion on the device).
        """
        inputs = ExpertInputs.found_in(args, kwargs)
        if inputs is None:
            raise TypeError(
                f"{type(self.module).__name__}, whose experts are sharded over the ranks whole, must be given tokens"
                " [tokens, hidden], the experts that they choose [tokens, choices], and weights like these:"
                ' cut={"....experts.*": 1} or keep_whole= plans it otherwise'
            )
        hidden, index, weights = inputs.of(args, kwargs)
        if not has_values(hidden):
            reads = [hidden, index, weights, *self._parameters()]
            return recording.record(WHOLE_EXPERTS.primitive, reads, hidden.shape, self.ownership.digest)
        total = self.ownership.size
        check_indices(index, (index >= 0) & (index < total), f"a token's choices must be in [0, {total}), the experts")
        positions, mine = local_positions(index, self.ownership, self.rank)
        token, choice = mine.nonzero(as_tuple=True)
        chosen, weight = positions[token, choice], weights[token, choice]
        if torch.compiler.is_compiling() or not len(token):  # the parameters need gradients all the same, of zeros
            token, chosen = (torch.cat([found, index.new_zeros(1)]) for found in (token, chosen))
            weight = torch.cat([weight, weights[0, :1] * 0])
        args, kwargs = inputs.replaced(args, kwargs, hidden[token], chosen.unsqueeze(1), weight.unsqueeze(1))
        addends = self.forward(*args, **kwargs)
        return torch.zeros_like(hidden).index_add(0, token, addends)

    def _parameters(self) -> list[Tensor]:
        """As the operator in the graph has them: the stacked ones by name, then the others."""
        own = parameters_of(self.module)
        others = [(name, parameter) for name, parameter in self.module.named_parameters() if "." in name]
        return [*(own[name] for name in sorted(own)), *(parameter for _, parameter in sorted(others))]  # type: ignore[list-item]


def keep_own(module: nn.Module, use: ImplementationPlan, layout: Shard, group: TPGroup, local: LocalParameters) -> None:
    """Leave a module only those of its stacked experts that this rank has."""
    ((dim, ownership),) = layout.dims
    for name in list(parameters_of(module)):
        localize_parameter(module, name, dim, ownership, group, local)
    # A method, not the object: compiled code is the same for all modules whose method is the same.
    module.forward = WholeExperts(module, ownership, group.rank).__call__


WHOLE_EXPERTS = Implementation(
    name="by expert",
    operator=EXPERTS,
    is_module=True,
    operand="weight",
    dims=(0,),
    outputs=(DEFERRED_SUM,),
    primitive="whole_experts",
    reads=("hidden_states", "index", "weights", "weight", "stacked", "others"),
    build=keep_own,
)
