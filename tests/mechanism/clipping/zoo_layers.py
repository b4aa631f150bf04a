"""Animals by layer family: linear maps, convolutions, normalisation, look-ups."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mechanism.clipping.zoo_tools import (
    CLASSES,
    RECORDS,
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
