"""Architectures of the literature in plain torch, written as users write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mechanism.clipping.public.libraries import CLASSES, RECORDS, WORDS, Case, Member, of_labels
from tests.mechanism.clipping.public.libraries import labels as some_labels
from tests.mechanism.clipping.public.libraries import words as some_words

PLAIN: dict[str, Member] = {}


def numbers(*shape: int) -> Tensor:
    return torch.randn(RECORDS, *shape, dtype=torch.float64)


def member(function: Callable[[], tuple[nn.Module, Any]]) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> Case:
        module, x = function()
        return module, of_labels, x, some_labels()

    PLAIN[function.__name__.replace("_", "-")] = Member(build)
    return function


# containers: the proven list ---------------------------------------------------------------------------------------


@member
def multilayer_perceptron() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, CLASSES)), numbers(6)


@member
def lenet() -> tuple[nn.Module, Any]:
    body = [nn.Conv2d(1, 4, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(4, 6, 5), nn.Tanh(), nn.AvgPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, CLASSES)), numbers(1, 16, 16)


@member
def vgg_with_group_norm() -> tuple[nn.Module, Any]:
    def block(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(2, outer), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(3, 4), *block(4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0)]
    return nn.Sequential(*layers, nn.Linear(8, CLASSES)), numbers(3, 8, 8)


@member
def text_convolutions() -> tuple[nn.Module, Any]:
    class Channels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2)

    body = [nn.Embedding(WORDS, 6), Channels(), nn.Conv1d(6, 8, 3), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(8, CLASSES)), some_words()


@member
def fast_text() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.EmbeddingBag(WORDS, 8), nn.Linear(8, CLASSES)), some_words()


@member
def encoder_of_torch() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(WORDS, 8), stack, nn.Flatten(), nn.Linear(64, CLASSES)), some_words()


# attention and recurrence ------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[Any], both: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.cell = kind(6, 5, 2, batch_first=True, bidirectional=both)
        self.head = nn.Linear(10 if both else 5, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.cell(self.words(words))[0][:, -1])


@member
def lstm() -> tuple[nn.Module, Any]:
    return Recurrent(nn.LSTM), some_words()


@member
def gru_both_ways() -> tuple[nn.Module, Any]:
    return Recurrent(nn.GRU, both=True), some_words()


@member
def elman() -> tuple[nn.Module, Any]:
    return Recurrent(nn.RNN), some_words()


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = state = x.new_zeros(len(x), 6)
        for step in x.unbind(1):
            hidden, state = self.cell(step, (hidden, state))
        return self.head(hidden)


@member
def lstm_cells() -> tuple[nn.Module, Any]:
    return Cells(), numbers(4, 3)


class Transformer(nn.Module):
    """As in the tutorials: learnt tokens, sines for positions, torch's encoder."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.words, self.causal = nn.Embedding(WORDS, 8), causal
        place, rate = torch.arange(32).unsqueeze(1), torch.exp(torch.arange(0, 8, 2) * (-math.log(1e4) / 8))
        self.register_buffer("places", torch.stack([torch.sin(place * rate), torch.cos(place * rate)], 2).flatten(1))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=causal)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) * math.sqrt(8) + self.places[: words.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=x.dtype) if self.causal else None
        return self.head(self.encoder(x, mask=mask).mean(1))


@member
def transformer_of_the_tutorials() -> tuple[nn.Module, Any]:
    return Transformer(causal=False), some_words()


@member
def causal_transformer() -> tuple[nn.Module, Any]:
    return Transformer(causal=True), some_words()


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.inner = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        return self.head(self.inner(self.words(text), self.words(target))[:, 0])


@member
def encoder_and_decoder() -> tuple[nn.Module, Any]:
    return Translation(), (some_words(), some_words(5))


class Pooled(nn.Module):
    """Attention pooling with a learnt query."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 8))
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.query.expand(len(x), -1, -1), x, x)[0].squeeze(1))


@member
def attention_pooling() -> tuple[nn.Module, Any]:
    return Pooled(), numbers(5, 8)


class Block(nn.Module):
    """One block of a small GPT, with a mask in a buffer."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.all, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.register_buffer("mask", torch.ones(length, length).tril().view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.all(self.first(x)).split(c, dim=2)
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in (q, k, v))
        weights = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        weights = F.softmax(weights.masked_fill(self.mask[:, :, :t, :t] == 0, -torch.inf), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.second(x))


class SmallGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(8, 2, 16) for _ in range(2)])
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, -1]


@member
def small_gpt_with_tied_weights() -> tuple[nn.Module, Any]:
    return SmallGPT(), some_words()
