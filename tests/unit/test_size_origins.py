"""Sizes of tensors inside a model follow from those of its arguments as they do when it runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.capture.capture import ExampleCall, capture
from lightning_autotp.operators.questions import TOLD, Question
from lightning_autotp.proving.call_kinds import numbers_of


class Net(nn.Module):
    """Asks for one size."""

    def __init__(self, size: Callable[[Net, Tensor], int]) -> None:
        super().__init__()
        self.embed, self.linear, self.size = nn.Embedding(30, 10), nn.Linear(10, 24), size
        self.conv, self.padded = nn.Conv1d(24, 4, 3, stride=2), nn.Conv1d(24, 4, 5, padding=1, dilation=2)
        self.register_buffer("table", torch.zeros(40, 24))
        self.table: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.linear(self.embed(ids))
        if self.size(self, ids) == -1:
            return ids
        return hidden

    def hidden(self, ids: Tensor) -> Tensor:
        out: Tensor = self.linear(self.embed(ids)).relu()
        return out

    def heads(self, ids: Tensor) -> Tensor:
        rows, tokens = ids.shape
        return self.hidden(ids).view(rows, tokens, 6, -1).transpose(1, 2)


FOLLOWED: dict[str, Callable[[Net, Tensor], int]] = {
    "an argument": lambda net, ids: ids.shape[1],
    "an activation": lambda net, ids: net.hidden(ids).size(-2),
    "a dim by name": lambda net, ids: net.hidden(ids).size(dim=1),
    "heads": lambda net, ids: net.heads(ids).shape[2],
    "scores": lambda net, ids: (net.heads(ids) @ net.heads(ids).transpose(-1, -2)).softmax(-1).shape[-1],
    "attention": lambda net, ids: F.scaled_dot_product_attention(*[net.heads(ids)] * 3).transpose(1, 2).shape[1],
    "elements": lambda net, ids: net.hidden(ids).numel(),
    "merged": lambda net, ids: net.hidden(ids).reshape(-1, 24).shape[0],
    "flattened": lambda net, ids: net.hidden(ids).flatten(0, 1).shape[0],
    "what is left": lambda net, ids: net.hidden(ids).view(ids.shape[0], 4, -1).shape[2],
    "blocks": lambda net, ids: net.hidden(ids)[:, : ids.shape[1] // 4 * 4].unflatten(1, (-1, 4)).shape[1],
    "shifted": lambda net, ids: net.hidden(ids)[:, 1:].shape[1],
    "the last ones": lambda net, ids: net.hidden(ids)[:, -7:].shape[1],
    "at most": lambda net, ids: net.hidden(ids)[:, :20].shape[1],
    "of a table": lambda net, ids: net.table[: ids.shape[1]].shape[0],
    "every second": lambda net, ids: net.hidden(ids)[:, ::2].shape[1],
    "joined": lambda net, ids: torch.cat([net.hidden(ids), net.hidden(ids)[:, 2:]], 1).shape[1],
    "padded": lambda net, ids: F.pad(net.hidden(ids), (0, 0, 3, 0)).shape[1],
    "split": lambda net, ids: net.hidden(ids).split(9, 1)[1].shape[1],
    "chunks": lambda net, ids: net.hidden(ids).chunk(2, 1)[1].shape[1],
    "positions": lambda net, ids: torch.arange(3, ids.shape[1] + 4).expand(ids.shape[0], -1).shape[1],
    "a mask": lambda net, ids: torch.ones(ids.shape[1], ids.shape[1]).tril()[None].shape[1],
    "added": lambda net, ids: (net.hidden(ids) + net.table[: ids.shape[1]]).shape[1],
    "a convolution": lambda net, ids: net.conv(net.hidden(ids).transpose(1, 2)).shape[2],
    "a dilated one": lambda net, ids: net.padded(net.hidden(ids).mT).shape[-1],
    "pooled": lambda net, ids: F.max_pool1d(net.hidden(ids).mT, 3, stride=2).shape[-1],
    "stacked": lambda net, ids: torch.stack([net.hidden(ids)] * 3)[0].shape[1],
    "computed": lambda net, ids: -(-ids.shape[1] // 4) + ids.size()[0],
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_size_follows_as_it_does_when_the_model_runs(name: str) -> None:
    size = FOLLOWED[name]
    *ends, asked = capture(Net(size), torch.zeros(2, 13, dtype=torch.long)).questions
    expression, minus_one = asked.operands
    assert (asked.function, minus_one) == ("eq", -1)
    assert not isinstance(expression, int | float)
    for rows, tokens in ((2, 13), (3, 31), (7, 12), (5, 24)):
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        numbers = numbers_of(ExampleCall((ids,), {}))
        found = Question(TOLD, (expression,)).answer(numbers)
        if not all(end.answer(numbers) for end in ends):
            assert name in ("at most", "the last ones")
            continue  # another kind: a slice does not reach the end of a dim
        assert found == size(Net(size), ids), (rows, tokens)


NOT_FOLLOWED: dict[str, Callable[[Net, Tensor], int]] = {
    "values": lambda net, ids: (ids == 0).nonzero().shape[0],
    "either of two": lambda net, ids: (
        net.hidden(ids)[:, : ids.shape[1] - 4].unflatten(1, (3, -1)).flatten(1, 2).shape[-1]
    ),
    "what was told": lambda net, ids: net.hidden(ids)[:, : int(ids.shape[1] / 2)].shape[1],
    "a parameter": lambda net, ids: net.linear.weight.shape[0],
    "a size of its own": lambda net, ids: net.heads(ids).shape[1],
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_cannot_be_followed_is_no_question(name: str) -> None:
    asked = capture(Net(NOT_FOLLOWED[name]), torch.zeros(2, 13, dtype=torch.long)).questions
    assert not [question for question in asked if question.function == "eq"]


@pytest.mark.parametrize("tell", [len, lambda x: int(x.shape[0]), lambda x: {2: 2}.get(x.shape[0], 0)])
def test_a_size_that_code_asks_for_counts_with_its_value(tell: Callable[[Tensor], int]) -> None:
    asked = capture(Net(lambda net, ids: tell(net.hidden(ids))), torch.zeros(2, 13, dtype=torch.long)).questions
    assert Question(TOLD, ("dim [0][0] 0",)) in asked
