"""Models made of torch.nn's own layers, as tutorials write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.packages.entry import (
    CLASSES,
    HEADS,
    HIDDEN,
    LENGTH,
    VOCABULARY,
    Entry,
    classified,
    next_token,
    pictures,
    states,
    tokens,
)  # fmt: skip


class LanguageModel(nn.Module):
    """Embeddings, a causal encoder, a head."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, 112, dropout=0.0, batch_first=True, norm_first=norm_first, activation="gelu"
        )
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(2 * LENGTH, HIDDEN) * 0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens]`` -> ``[batch, tokens, vocabulary]``."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        states = self.embedding(x) + self.positions[: x.shape[1]]
        result: Tensor = self.head(self.encoder(states, mask=mask, is_causal=True))
        return result


class Translator(nn.Module):
    """``nn.Transformer`` with a head."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.transformer = nn.Transformer(
            HIDDEN, HEADS, 2, 2, 112, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        """``[batch, tokens]`` twice -> ``[batch, target tokens, vocabulary]``."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        states = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        result: Tensor = self.head(states)
        return result


class Attending(nn.Module):
    """Blocks around ``nn.MultiheadAttention``: over the tokens, and across to another sequence of other features."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(3))
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
        self.across = nn.MultiheadAttention(HIDDEN, HEADS, kdim=HIDDEN, vdim=HIDDEN, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 112), nn.SiLU(), nn.Linear(112, HIDDEN))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """``[batch, tokens, hidden]`` and ``[batch, others, hidden]`` -> ``[batch, tokens, hidden]``."""
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        x = x + self.across(self.norms[1](x), context, context)[0]
        result: Tensor = x + self.mlp(self.norms[2](x))
        return result


class Recurrent(nn.Module):
    """An LSTM (or GRU) between an embedding and a head."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.recurrence = kind(HIDDEN, HIDDEN, 2, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens]`` -> ``[batch, tokens, vocabulary]``."""
        result: Tensor = self.head(self.recurrence(self.embedding(x))[0])
        return result


class Residual(nn.Module):
    """A block of convolutions, one of them in groups, with norms of groups and one activation between all of them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inside = 2 * channels
        self.norm = nn.GroupNorm(8, channels)
        self.up = nn.Conv2d(channels, inside, 3, padding=1)
        self.inner_norm = nn.GroupNorm(8, inside)
        self.grouped = nn.Conv2d(inside, inside, 3, padding=1, groups=4)
        self.down = nn.Conv2d(inside, channels, 1)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, channels, height, width]``, in and out."""
        inside = self.activation(self.inner_norm(self.up(self.activation(self.norm(x)))))
        result: Tensor = x + self.down(self.activation(self.grouped(inside)))
        return result


def residuals() -> nn.Module:
    """A classifier of pictures made of two such blocks, of different width."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), Residual(32), nn.Conv2d(32, 64, 3, stride=2, padding=1), Residual(64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip


class Convolving(nn.Module):
    """Causal convolutions over the tokens with gates, as WaveNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.convolutions = nn.ModuleList(nn.Conv1d(HIDDEN, 2 * 96, 3, padding=2 * n, dilation=n) for n in (1, 2))
        self.outputs = nn.ModuleList(nn.Conv1d(96, HIDDEN, 1) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens]`` -> ``[batch, tokens, vocabulary]``."""
        states = self.embedding(x).transpose(1, 2)
        for convolution, output in zip(self.convolutions, self.outputs, strict=True):
            values, gates = convolution(states)[..., : x.shape[1]].chunk(2, dim=1)
            states = states + output(torch.tanh(values) * torch.sigmoid(gates))
        result: Tensor = self.head(self.norm(states.transpose(1, 2)))
        return result


class Bags(nn.Module):
    """Two bags of words, compared: ``nn.EmbeddingBag`` and ``nn.Bilinear``."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY, HIDDEN)
        self.compare = nn.Bilinear(HIDDEN, HIDDEN, 48)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(48, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """``[batch, tokens]`` twice -> ``[batch, classes]``."""
        result: Tensor = self.head(self.compare(self.words(x), self.words(y)))
        return result


def convolutions() -> nn.Module:
    """A small classifier of pictures, in one ``nn.Sequential``."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 112), nn.ReLU(), nn.Linear(112, CLASSES),
    )  # fmt: skip


MODELS = (
    Entry("TransformerEncoder", LanguageModel, tokens(), next_token),
    Entry("TransformerEncoder, norms first", lambda: LanguageModel(norm_first=True), tokens(), next_token),
    Entry("Transformer", Translator, tokens("target", "source"), next_token),
    Entry("Transformer, norms first", lambda: Translator(norm_first=True), tokens("target", "source"), next_token),
    Entry("MultiheadAttention", Attending, states("x", "context")),
    Entry("LSTM", lambda: Recurrent(nn.LSTM), tokens(), next_token),
    Entry("GRU", lambda: Recurrent(nn.GRU), tokens(), next_token),
    Entry("Conv2d in a Sequential", convolutions, pictures(32, "input"), classified),
    Entry("Conv2d in residual blocks, group norms", residuals, pictures(32, "input"), classified),
    Entry("Conv1d with gates", Convolving, tokens(), next_token),
    Entry("EmbeddingBag and Bilinear", Bags, tokens("x", "y"), classified),
)
