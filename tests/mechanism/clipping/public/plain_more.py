"""More architectures in plain torch: tables, images, sets, graphs, functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mechanism.clipping.public.libraries import CLASSES, WORDS
from tests.mechanism.clipping.public.libraries import words as some_words
from tests.mechanism.clipping.public.plain import PLAIN as PLAIN
from tests.mechanism.clipping.public.plain import member, numbers

# tables -------------------------------------------------------------------------------------------------------------


class FTTransformer(nn.Module):
    """Every feature a token with a weight and a bias of its own; a class token on top."""

    def __init__(self, features: int, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, width) / width)
        self.bias = nn.Parameter(torch.randn(features, width) / width)
        self.token = nn.Parameter(torch.randn(width))
        layer = nn.TransformerEncoderLayer(width, 2, 12, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unsqueeze(-1) * self.weight + self.bias
        tokens = torch.cat([self.token.expand(len(x), 1, -1), tokens], 1)
        return self.head(F.relu(self.norm(self.encoder(tokens)[:, 0])))


@member
def ft_transformer() -> tuple[nn.Module, Any]:
    return FTTransformer(5), numbers(5)


class EnsembleLinear(nn.Module):
    """One matrix, with a vector before and after it for each of `count` members."""

    def __init__(self, inner: int, outer: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer, bias=False)
        self.before, self.after = nn.Parameter(torch.randn(count, inner)), nn.Parameter(torch.randn(count, outer))
        self.bias = nn.Parameter(torch.zeros(count, outer))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.before) * self.after + self.bias


class TabM(nn.Module):
    def __init__(self, features: int, count: int = 4) -> None:
        super().__init__()
        self.count, self.first = count, EnsembleLinear(features, 8, count)
        self.second = EnsembleLinear(8, 8, count)
        self.head = nn.Parameter(torch.randn(count, 8, CLASSES) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, self.count, -1)
        x = F.relu(self.second(F.relu(self.first(x))))
        return torch.einsum("nki,kio->nko", x, self.head).mean(1)


@member
def tab_m() -> tuple[nn.Module, Any]:
    return TabM(6), numbers(6)


class WideAndDeep(nn.Module):
    """Crossed with itself (DCN), factorised (DeepFM), beside a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.cross = nn.ModuleList([nn.Linear(12, 12) for _ in range(2)])
        self.deep = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(17, CLASSES)

    def forward(self, kinds: Tensor) -> Tensor:
        looked = self.words(kinds)
        start = x = looked.flatten(1)
        for layer in self.cross:
            x = start * layer(x) + x
        pairs = 0.5 * (looked.sum(1).square() - looked.square().sum(1)).sum(1, keepdim=True)
        return self.head(torch.cat([x, self.deep(start), pairs], 1))


@member
def crossed_wide_and_deep() -> tuple[nn.Module, Any]:
    return WideAndDeep(), some_words(3)


class ResidualTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(2)
        )
        self.head = nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@member
def resnet_for_tables() -> tuple[nn.Module, Any]:
    return ResidualTable(), numbers(6)


# images, sets, graphs, functions -------------------------------------------------------------------------------------


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, 4)
        self.norms = nn.ModuleList([nn.LayerNorm(6) for _ in range(3)])
        self.over_places = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.over_channels = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.over_places(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.over_channels(self.norms[1](x))
        return self.head(self.norms[2](x).mean(1))


@member
def mlp_mixer() -> tuple[nn.Module, Any]:
    return Mixer(), numbers(3, 8, 8)


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.GroupNorm(2, outer), nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.GroupNorm(2, outer),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.GroupNorm(2, outer))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


@member
def resnet_with_group_norm() -> tuple[nn.Module, Any]:
    blocks = Residual(3, 4, 1), Residual(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    return nn.Sequential(*blocks), numbers(3, 8, 8)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3 + 2 * count, 2, 3, padding=1) for count in range(3)])
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


@member
def densely_connected() -> tuple[nn.Module, Any]:
    return Dense(), numbers(3, 6, 6)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = F.relu(self.down(x))
        right = self.up(F.relu(self.deep(F.max_pool2d(left, 2))))
        return self.out(torch.cat([left, F.interpolate(right, size=left.shape[-2:])], 1)).mean((2, 3))


@member
def u_net() -> tuple[nn.Module, Any]:
    return UNet(), numbers(1, 8, 8)


class Excited(nn.Module):
    """Inverted residual with squeeze and excitation, and channel-wise scaling."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depth = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.project, self.norm = nn.Conv2d(8, 4, 1), nn.GroupNorm(1, 4)
        self.scale, self.head = nn.Parameter(torch.ones(4, 1, 1)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.depth(F.silu(self.expand(x))))
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(inner.mean((2, 3), keepdim=True)))))
        x = x + self.scale * self.norm(self.project(inner * gate))
        return self.head(x.mean((2, 3)))


@member
def squeeze_and_excitation() -> tuple[nn.Module, Any]:
    return Excited(), numbers(4, 6, 6)


class Temporal(nn.Module):
    """Causal dilated convolutions with normalised weights."""

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv1d(2, 4, 2, dilation=2)
        self.first = nn.utils.parametrizations.weight_norm(convolution)
        self.second, self.head = nn.Conv1d(4, 4, 2, dilation=4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(F.pad(x, (2, 0))))
        return self.head(F.relu(self.second(F.pad(x, (4, 0))))[..., -1])


@member
def temporal_convolutions() -> tuple[nn.Module, Any]:
    return Temporal(), numbers(2, 8)


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8))
        self.outer = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).amax(1))


@member
def deep_sets() -> tuple[nn.Module, Any]:
    return Sets(), numbers(7, 3)


class Graphs(nn.Module):
    """Two rounds of messages over a dense graph that comes with the record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        weights = edges.abs() / edges.abs().sum(2, keepdim=True)
        x = F.relu(weights @ self.first(nodes))
        return self.head(F.relu(weights @ self.second(x)).mean(1))


@member
def graph_convolutions() -> tuple[nn.Module, Any]:
    return Graphs(), (numbers(5, 3), numbers(5, 5))


class Splines(nn.Module):
    """A Kolmogorov-Arnold layer: a sum of bumps on every edge."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 5))
        self.bumps, self.base = nn.Parameter(torch.randn(outer, inner, 5) / 5), nn.Linear(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-((x.unsqueeze(-1) - self.grid) ** 2))
        return self.base(F.silu(x)) + torch.einsum("nig,oig->no", basis, self.bumps)


@member
def kolmogorov_arnold() -> tuple[nn.Module, Any]:
    return nn.Sequential(Splines(4, 6), Splines(6, CLASSES)), numbers(4)


class Flow(nn.Module):
    """A neural differential equation, by Euler's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for step in range(4):
            time = torch.full((len(x), 1), step / 4, dtype=x.dtype)
            x = x + 0.25 * self.field(torch.cat([x, time], 1))
        return self.head(x)


@member
def neural_differential_equation() -> tuple[nn.Module, Any]:
    return Flow(), numbers(4)


class Experts(nn.Module):
    """Two experts of four for every record, as many write it: a loop over experts with a mask of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(5, 4), nn.Linear(6, CLASSES)
        self.experts = nn.ModuleList([nn.Linear(5, 6) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(1).topk(2, 1)
        out = x.new_zeros(len(x), 6)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            if len(rows):
                out = out.index_add(0, rows, weights[rows, place].unsqueeze(1) * expert(x[rows]))
        return self.head(out)


@member
def sparse_experts() -> tuple[nn.Module, Any]:
    return Experts(), numbers(5)


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.body(x))).mean((2, 3)))


@member
def with_batch_norm() -> tuple[nn.Module, Any]:
    return BatchNormed(), numbers(3, 6, 6)
