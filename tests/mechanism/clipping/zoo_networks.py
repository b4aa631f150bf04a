"""Animals with attention, recurrence, and parameters in unusual places."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.mechanism.clipping.zoo_tools import (
    CLASSES,
    RECORDS,
    ZOO,
    Animal,
    Case,
    Lambda,
    animal,
    classes,
    floats,
    images,
    labels,
    plain,
    tokens,
)

# attention and recurrence ---------------------------------------------------------------------------------------


def encoder(dropout: float, batch_first: bool, norm_first: bool) -> Case:
    def forward(self: Any, words: Tensor) -> Tensor:
        hidden = self.words(words)
        hidden = self.encoder(hidden if batch_first else hidden.transpose(0, 1))
        return self.head(hidden.mean(1 if batch_first else 0))

    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=batch_first, norm_first=norm_first)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return (
        Lambda(forward, words=nn.Embedding(7, 8), encoder=stack, head=nn.Linear(8, CLASSES)),
        classes,
        tokens(7, RECORDS),  # as many positions as records: the axis cannot be told from the size
        labels(),
    )


@animal
def transformer() -> Case:
    return encoder(0.0, batch_first=True, norm_first=False)


@animal
def transformer_with_positions_first() -> Case:
    return encoder(0.0, batch_first=False, norm_first=True)


def transformer_with_dropout() -> Case:
    return encoder(0.3, batch_first=True, norm_first=False)


ZOO["transformer_with_dropout"] = Animal(transformer_with_dropout, masks=True)


@animal
def cross_attention() -> Case:
    def forward(self: Any, queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        first, weights = self.first(queries, keys, keys, key_padding_mask=hidden)
        second, _ = self.second(first, keys, keys.flip(1), need_weights=False, attn_mask=causal)
        third, _ = self.third(second, keys, queries[:, :4].tanh())
        return self.head((third.mean(1) + weights.sum((1, 2))[:, None]).flatten(1))

    causal = torch.ones(5, 4, dtype=torch.bool).triu(2)
    layers: dict[str, nn.Module] = {
        "first": nn.MultiheadAttention(6, 2, batch_first=True),
        "second": nn.MultiheadAttention(6, 3, batch_first=True, bias=False),
        "third": nn.MultiheadAttention(6, 2, batch_first=True, kdim=6, vdim=6),
        "head": nn.Linear(6, CLASSES),
    }
    hidden = torch.zeros(RECORDS, 4, dtype=torch.bool)
    hidden[:, 3] = torch.arange(RECORDS) % 2 == 0
    return Lambda(forward, **layers), classes, (floats(5, 6), floats(4, 6), hidden), labels()


@animal
def attention_with_learnt_keys() -> Case:  # left to the fallback
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))

    attention = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True)
    return Lambda(forward, attention=attention, head=nn.Linear(6, CLASSES)), classes, floats(3, 6), labels()


def last_state(layer: nn.RNNBase) -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        output, state = self.layer(x)
        state = state[1] if isinstance(state, tuple) else state
        return self.head(output.mean(1)) + self.tail(state[-1])

    width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
    head, tail = nn.Linear(width, CLASSES), nn.Linear(layer.hidden_size, CLASSES)
    return Lambda(forward, layer=layer, head=head, tail=tail), classes, floats(5, 3), labels()


@animal
def lstm() -> Case:
    return last_state(nn.LSTM(3, 4, batch_first=True))


@animal
def deep_lstm_both_ways() -> Case:
    return last_state(nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True, proj_size=2))


def lstm_with_dropout() -> Case:
    return last_state(nn.LSTM(3, 4, num_layers=3, batch_first=True, dropout=0.4))


ZOO["lstm_with_dropout"] = Animal(lstm_with_dropout, masks=True)


@animal
def gru() -> Case:
    return last_state(nn.GRU(3, 4, num_layers=2, batch_first=True))


@animal
def plain_recurrence() -> Case:
    return last_state(nn.RNN(3, 4, nonlinearity="relu", batch_first=True, bias=False))


@animal
def lstm_with_positions_first() -> Case:
    def forward(self: Any, x: Tensor, state: Tensor) -> Tensor:
        output, _ = self.layer(x.transpose(0, 1), (state[None], state[None].tanh()))
        return self.head(output[-1])

    x = floats(5, 3), floats(4)
    return Lambda(forward, layer=nn.LSTM(3, 4), head=nn.Linear(4, CLASSES)), classes, x, labels()


@animal
def recurrent_cell() -> Case:  # a layer without a rule, used several times
    def forward(self: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)

    return Lambda(forward, cell=nn.GRUCell(3, 4), head=nn.Linear(4, CLASSES)), classes, floats(4, 3), labels()


# parameters in unusual places -----------------------------------------------------------------------------------


@animal
def module_used_twice() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.shared(x))
        hidden = torch.tanh(self.norm(self.shared(hidden)))
        return self.head(self.norm(self.shared(hidden)))

    return plain(Lambda(forward, shared=nn.Linear(5, 5), norm=nn.LayerNorm(5), head=nn.Linear(5, CLASSES)), 5)


@animal
def convolution_used_twice() -> Case:
    shared = nn.Conv2d(3, 3, 3, padding=1)
    return images(shared, nn.Tanh(), shared, nn.Conv2d(3, 2, 3))


@animal
def tied_weights() -> Case:
    def forward(self: Any, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.words(words)))).mean(1)[:, :CLASSES]

    module = Lambda(forward, words=nn.Embedding(7, 5), middle=nn.Linear(5, 5), head=nn.Linear(5, 7))
    module.head.weight = module.words.weight
    return module, classes, tokens(7, 6), labels()


@animal
def tied_words_and_a_bias() -> Case:
    """A small language model: more look-ups than pairs are compared for, a read-out at one position."""

    def forward(self: Any, words: Tensor) -> Tensor:
        state = self.norm(self.words(words) + self.places(torch.arange(words.shape[1])))
        return self.head(torch.tanh(state).cumsum(1)[:, -1])[:, :CLASSES]

    module = Lambda(
        forward, words=nn.Embedding(9, 5), places=nn.Embedding(40, 5), norm=nn.LayerNorm(5), head=nn.Linear(5, 9)
    )
    module.head.weight = module.words.weight
    return module, classes, tokens(9, 40), labels()


@animal
def tied_linear_layers() -> Case:
    module = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    module[2].weight = module[0].weight
    return plain(module, 5)


@animal
def weight_used_outside_its_layer() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        code = torch.tanh(self.encoder(x))
        return self.head(F.linear(code, self.encoder.weight.t()))

    return plain(Lambda(forward, encoder=nn.Linear(5, 3), head=nn.Linear(5, CLASSES)), 5)


@animal
def frozen_parameters() -> Case:
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, CLASSES))
    module[0].requires_grad_(False)
    module[2].weight.requires_grad_(False)
    module[3].bias.requires_grad_(False)
    module[4].bias.requires_grad_(False)
    return plain(module, 5)


@animal
def frozen_convolutions() -> Case:
    module, loss, x, y = images(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 2), nn.Conv2d(2, 2, 2))
    module[0][0].bias.requires_grad_(False)
    module[0][1].weight.requires_grad_(False)
    module[0][2].weight.requires_grad_(False)
    return module, loss, x, y


@animal
def bare_parameter() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        start = self.start.expand(x.shape[0], 1, -1)
        hidden = self.drop(self.body(torch.cat([start, x], 1)) * self.scale)
        return self.head(hidden[:, 0] + hidden.mean(1))

    layers: dict[str, Any] = {
        "body": nn.Linear(5, 5), "head": nn.Linear(5, CLASSES), "drop": nn.Dropout(0.3),
        "start": nn.Parameter(torch.randn(1, 1, 5)), "scale": nn.Parameter(torch.randn(5)),
    }  # fmt: skip
    return plain(Lambda(forward, **layers), 3, 5)


@animal
def bare_matrix_under_dropout() -> Case:  # cannot be copied, so the module is run again with the same masks
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.drop(torch.einsum("bti,ij->btj", self.body(x), self.matrix))
        noise = torch.randn(hidden.shape, dtype=hidden.dtype)
        return self.head(F.dropout(hidden + 0.1 * noise, 0.2).mean(1))

    layers: dict[str, Any] = {
        "body": nn.Linear(5, 5), "head": nn.Linear(4, CLASSES), "drop": nn.Dropout1d(0.3),
        "matrix": nn.Parameter(torch.randn(5, 4)),
    }  # fmt: skip
    return plain(Lambda(forward, **layers), 3, 5)


@animal
def vision_transformer() -> Case:  # class token and positions as bare parameters
    def forward(self: Any, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        return self.head(self.block(hidden)[:, 0] * self.scale)

    layers: dict[str, Any] = {
        "patches": nn.Conv2d(3, 8, 2, 2), "token": nn.Parameter(torch.randn(1, 1, 8)),
        "places": nn.Parameter(torch.randn(10, 8)), "scale": nn.Parameter(torch.randn(())),
        "block": nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), "head": nn.Linear(8, CLASSES),
    }  # fmt: skip
    return plain(Lambda(forward, **layers), 3, 6, 6)


class Rating(nn.Module):
    """A pairwise rating: both players' rows with opposite signs, nothing for a player against itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rating = nn.Embedding(50, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rating(x.long())
        return (found[:, 0] - found[:, 1]).squeeze(-1)


class OwnNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


@animal
def norms_of_ones_own() -> Case:  # the same kind of layer on tensors of different ranks
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.second(self.body(self.first(x)))
        return self.head(self.third(hidden.mean(1)))

    norms = {name: OwnNorm(5) for name in ("first", "second", "third")}
    return plain(Lambda(forward, body=nn.Linear(5, 5), head=nn.Linear(5, CLASSES), **norms), 4, 5)


@animal
def positions_used_in_two_ways() -> Case:  # spread over the records in one place, transposed in the other
    def forward(self: Any, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1])[None])
        return self.head((x + places) @ places[0].transpose(0, 1)).mean(1)

    return plain(Lambda(forward, places=nn.Embedding(4, 5), head=nn.Linear(4, CLASSES)), 4, 5)


@animal
def layer_without_a_rule() -> Case:
    return plain(nn.Sequential(nn.Linear(5, 4), nn.PReLU(4), nn.Linear(4, CLASSES)), 5)


@animal
def bilinear_layer() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.bilinear(self.first(x), x)

    return plain(Lambda(forward, first=nn.Linear(5, 3), bilinear=nn.Bilinear(3, 5, CLASSES)), 5)


@animal
def parametrised_weight() -> Case:
    return plain(nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, CLASSES)), 5)


@animal
def windows_folded_into_the_batch() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        windows = x.reshape(x.shape[0] * 2, 3, 5, 5)
        hidden = self.mix(torch.relu(self.norm(self.conv(windows))).flatten(1))
        return self.head(hidden.reshape(x.shape[0], -1))

    layers = {
        "conv": nn.Conv2d(3, 4, 3), "norm": nn.GroupNorm(2, 4), "mix": nn.Linear(36, 5), "head": nn.Linear(10, CLASSES),
    }  # fmt: skip
    return plain(Lambda(forward, **layers), 2, 3, 5, 5)


class LookOnce(torch.autograd.Function):
    """A function of one's own, which vmap cannot run."""

    @staticmethod
    def forward(context: Any, values: Tensor, scale: Tensor) -> Tensor:
        context.save_for_backward(values, scale)
        return values * scale

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = context.saved_tensors
        return gradient * scale, (gradient * values).sum(0)


@animal
def function_that_vmap_cannot_run() -> Case:
    scaled = Lambda(lambda self, x: LookOnce.apply(x, self.scale), scale=nn.Parameter(torch.randn(4)))
    return plain(nn.Sequential(nn.Linear(5, 4), scaled, nn.Linear(4, CLASSES)), 5)


@animal
def several_outputs() -> Case:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(x))
        return self.mean(hidden), self.spread(hidden)

    def gaussian(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        mean, spread = output
        return ((mean - y).square() * (-spread).exp() + spread).sum(1)

    return (
        Lambda(forward, body=nn.Linear(5, 6), mean=nn.Linear(6, 2), spread=nn.Linear(6, 2)),
        gaussian,
        floats(5),
        floats(2),
    )
