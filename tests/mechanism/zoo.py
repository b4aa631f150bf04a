"""Modules that the clipping engine must get right, each with a loss and a batch, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from confide.models.bayesian import (
    MeanFieldConv2d,
    MeanFieldLinear,
    VariationalDropoutConv2d,
    VariationalDropoutLinear,
    draw_,
)

RECORDS = 6
CLASSES = 4
Case = tuple[nn.Module, Callable[[Any, Any], Tensor], Any, Any]
ZOO: dict[str, Animal] = {}


@dataclass(frozen=True)
class Animal:
    """`masks`: draws dropout masks inside attention or recurrent layers, in the engine's own order."""

    build: Callable[[], Case]
    masks: bool = False

    def case(self) -> Case:
        torch.manual_seed(0)
        module, loss, x, y = self.build()
        module = module.double()
        draws = next(
            (getattr(layer, "zoo_draws", None) for layer in module.modules() if hasattr(layer, "zoo_draws")), 1
        )
        draw_(module, torch.Generator().manual_seed(5), draws)
        return module, loss, x, y


def animal(function: Callable[[], Case]) -> Callable[[], Case]:
    ZOO[function.__name__] = Animal(function)
    return function


def classes(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(1), y, reduction="none")


def labels(records: int = RECORDS) -> Tensor:
    return torch.randint(0, CLASSES, (records,))


def floats(*shape: int) -> Tensor:
    return torch.randn(RECORDS, *shape, dtype=torch.float64)


def plain(module: nn.Module, *shape: int) -> Case:
    return module, classes, floats(*shape), labels()


def images(*layers: nn.Module, channels: int = 3, size: int = 7) -> Case:
    """Layers over small images, then a linear layer."""
    body = nn.Sequential(*layers, nn.Flatten())
    x = floats(channels, size, size)
    for layer in body:
        layer.double()
    width = body(x).shape[1]
    return nn.Sequential(body, nn.Linear(width, CLASSES)), classes, x, labels()


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


# linear layers --------------------------------------------------------------------------------------------------


@animal
def logistic_regression() -> Case:
    return plain(nn.Linear(5, CLASSES), 5)


@animal
def mlp() -> Case:
    return plain(
        nn.Sequential(nn.Linear(5, 9), nn.ReLU(inplace=True), nn.Linear(9, 3), nn.Tanh(), nn.Linear(3, CLASSES)), 5
    )


@animal
def mlp_without_bias() -> Case:
    return plain(nn.Sequential(nn.Linear(5, 9, bias=False), nn.SiLU(), nn.Linear(9, CLASSES, bias=False)), 5)


@animal
def linear_on_short_sequences() -> Case:  # few positions and wide layers: ghost norms
    return plain(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, CLASSES)), 1, 20)


@animal
def linear_on_long_sequences() -> Case:  # many positions: gradients formed in full
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).mean((1, 2))

    return plain(Lambda(forward, first=nn.Linear(3, 4), second=nn.Linear(4, CLASSES)), 2, 9, 3)


@animal
def dropout() -> Case:
    return plain(nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.5), nn.ReLU(), nn.Linear(9, CLASSES)), 5)


@animal
def masks_given() -> Case:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) * mask)

    x = floats(5), (torch.rand(RECORDS, 9) < 0.5).double() * 2
    return Lambda(forward, first=nn.Linear(5, 9), second=nn.Linear(9, CLASSES)), classes, x, labels()


@animal
def regression() -> Case:
    def squares(output: Tensor, y: Tensor) -> Tensor:
        return (output.squeeze(1) - y).square()

    return nn.Sequential(nn.Linear(5, 8), nn.ELU(), nn.Linear(8, 1)), squares, floats(5), floats()


# convolutions ---------------------------------------------------------------------------------------------------


@animal
def mnist_network() -> Case:
    return images(
        nn.Conv2d(1, 4, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(4, 6, 4, 2), nn.ReLU(),
        channels=1, size=20,
    )  # fmt: skip


@animal
def odd_strides_and_groups() -> Case:
    return images(nn.Conv2d(6, 8, (3, 2), (2, 3), padding=(1, 0), groups=2), nn.ReLU(), channels=6, size=9)


@animal
def depthwise_convolution() -> Case:
    return images(nn.Conv2d(4, 8, 3, groups=4, bias=False), nn.Conv2d(8, 5, 1), channels=4)


@animal
def dilated_convolution() -> Case:
    return images(nn.Conv2d(3, 4, 3, dilation=(2, 1), stride=(1, 2)), size=9)


@animal
def same_padding() -> Case:
    return images(nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2)), nn.Conv2d(4, 2, 3, padding="valid"))


@animal
def padding_modes() -> Case:
    return images(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 3, 3, padding=(2, 1), padding_mode="circular"),
        nn.Conv2d(3, 2, 3, padding=1, padding_mode="replicate"),
    )


@animal
def wide_convolution_on_few_positions() -> Case:  # ghost norms
    return images(nn.Conv2d(24, 30, 3), size=3, channels=24)


@animal
def convolution_over_time() -> Case:
    body = nn.Sequential(nn.Conv1d(3, 6, 3, stride=2, padding=2, groups=3), nn.ReLU(), nn.Flatten())
    return plain(nn.Sequential(body, nn.Linear(30, CLASSES)), 3, 8)


@animal
def convolution_in_three_dimensions() -> Case:
    body = nn.Sequential(nn.Conv3d(2, 3, (2, 3, 2), stride=(1, 2, 1), padding=1), nn.Flatten())
    return plain(nn.Sequential(body, nn.Linear(150, CLASSES)), 2, 4, 4, 4)


@animal
def transposed_convolution() -> Case:
    return images(
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.ConvTranspose2d(6, 2, (2, 3), dilation=(3, 2), stride=2, output_padding=(2, 1), bias=False),
        channels=4, size=4,
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(2, channels), nn.GroupNorm(2, channels)])

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)), inplace=True)
        return F.relu(x + self.norms[1](self.second(inner)))


@animal
def residual_network() -> Case:
    return images(nn.Conv2d(3, 4, 3), Residual(4), nn.Conv2d(4, 6, 1, stride=2), Residual(6), nn.AdaptiveAvgPool2d(1))


# normalisation --------------------------------------------------------------------------------------------------


@animal
def norms_over_features() -> Case:
    layers = (nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4), nn.RMSNorm(4))
    return plain(nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, CLASSES)), 3, 5)


@animal
def layer_norm_over_several_axes() -> Case:
    return images(nn.Conv2d(3, 2, 3), nn.LayerNorm((2, 5, 5)), nn.LayerNorm(5, bias=False))


@animal
def norms_over_channels() -> Case:
    return images(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.GroupNorm(2, 4, eps=1e-2))


@animal
def batch_norm_with_fixed_statistics() -> Case:
    module, loss, x, y = images(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    return module.eval(), loss, x, y


# look-ups -------------------------------------------------------------------------------------------------------


def tokens(count: int, length: int) -> Tensor:
    return torch.randint(0, count, (RECORDS, length))


@animal
def embeddings() -> Case:
    def forward(self: Any, words: Tensor, kind: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(words).mean(1) + self.kinds(kind)))

    layers = {"words": nn.Embedding(7, 5, padding_idx=0), "kinds": nn.Embedding(3, 5), "head": nn.Linear(5, CLASSES)}
    return Lambda(forward, **layers), classes, (tokens(7, 9), torch.randint(0, 3, (RECORDS,))), labels()


@animal
def embedding_of_long_texts() -> Case:
    def forward(self: Any, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(words)).flatten(1))

    return Lambda(forward, words=nn.Embedding(11, 3), head=nn.Linear(120, CLASSES)), classes, tokens(11, 40), labels()


@animal
def bags() -> Case:
    def forward(self: Any, words: Tensor, weights: Tensor) -> Tensor:
        mixed = [self.mean(words), self.sum(words, per_sample_weights=weights), self.max(words)]
        return self.head(torch.tanh(torch.cat(mixed, 1)))

    layers: dict[str, nn.Module] = {
        "mean": nn.EmbeddingBag(7, 3, mode="mean", padding_idx=1),
        "sum": nn.EmbeddingBag(7, 2, mode="sum"),
        "max": nn.EmbeddingBag(7, 4, mode="max", padding_idx=2),
        "head": nn.Linear(9, CLASSES),
    }
    x = tokens(7, 6), torch.rand(RECORDS, 6, dtype=torch.float64)
    return Lambda(forward, **layers), classes, x, labels()


@animal
def positions_without_records() -> Case:  # an embedding whose output all records share
    def forward(self: Any, words: Tensor) -> Tensor:
        places = self.places(torch.arange(words.shape[1]))
        return self.head(torch.tanh(self.words(words) + places)).mean(1)

    layers = {"words": nn.Embedding(7, 5), "places": nn.Embedding(9, 5), "head": nn.Linear(5, CLASSES)}
    return Lambda(forward, **layers), classes, tokens(7, 6), labels()


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


# Bayesian layers ------------------------------------------------------------------------------------------------


def with_draws(draws: int, *layers: nn.Module, shape: tuple[int, ...]) -> Case:
    module = nn.Sequential(*layers)
    module.zoo_draws = draws  # type: ignore[assignment]
    return plain(module, *shape)


def bayesian(name: str, draws: int, shape: tuple[int, ...], layers: Callable[[], list[nn.Module]]) -> None:
    ZOO[f"{name}_{draws}_draws"] = Animal(lambda: with_draws(draws, *layers(), shape=shape))


def mean_field_layers() -> list[nn.Module]:
    rho = {"initial_rho": -1.0}
    return [
        MeanFieldLinear(5, 7, **rho),
        nn.ReLU(),
        nn.Linear(7, 6),
        nn.Tanh(),
        MeanFieldLinear(6, CLASSES, bias=False, **rho),
    ]


def mean_field_over_positions() -> list[nn.Module]:
    return [MeanFieldLinear(5, 3, initial_rho=-1.0), nn.Tanh(), nn.Flatten(), MeanFieldLinear(12, CLASSES)]


def mean_field_images() -> list[nn.Module]:
    first = MeanFieldConv2d(4, 6, (3, 2), stride=2, padding=1, groups=2, initial_rho=-1.0)
    second = MeanFieldConv2d(6, 3, 2, dilation=2, bias=False, initial_rho=-1.0)
    return [first, nn.ReLU(), nn.GroupNorm(2, 6), second, nn.Flatten(), nn.Linear(3, CLASSES)]


def variational_layers() -> list[nn.Module]:
    wide = {"initial_log_variance": -1.0}
    return [VariationalDropoutLinear(5, 7, **wide), nn.ReLU(), VariationalDropoutLinear(7, CLASSES, bias=False, **wide)]


def variational_over_positions() -> list[nn.Module]:
    return [VariationalDropoutLinear(5, 3, initial_log_variance=-1.0), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES)]


def variational_images() -> list[nn.Module]:
    first = VariationalDropoutConv2d(4, 6, 3, stride=2, padding=1, groups=2, initial_log_variance=-2.0)
    return [first, nn.ReLU(), nn.Flatten(), VariationalDropoutLinear(54, CLASSES)]


for count in (1, 4):
    bayesian("mean_field", count, (5,), mean_field_layers)
    bayesian("mean_field_over_positions", count, (4, 5), mean_field_over_positions)
    bayesian("mean_field_images", count, (4, 5, 5), mean_field_images)
    bayesian("variational_dropout", count, (5,), variational_layers)
    bayesian("variational_dropout_over_positions", count, (4, 5), variational_over_positions)
    bayesian("variational_dropout_images", count, (4, 5, 5), variational_images)
