"""More of the corpus: rows that other libraries' idioms mix, losses of pairs of rows, statistics of a whole table.

Each stands where one record's answer is asked for; `corpus_built` has whole queries with a trick of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import rnn

from confide.sources.queries import GradientQuery, StatisticQuery
from tests.mechanism.clipping.corpus import CLASSES, WIDTH, Around, Attack, network, plain

HIDDEN = 4
Mix = Callable[[Tensor], Tensor]
Pair = Callable[[Tensor, Tensor], Tensor]


# the rows of a hidden layer -------------------------------------------------------------------------------------------


def _packed(x: Tensor) -> Tensor:
    lengths = (x.detach().abs().sum(1).long() % 3 + 1).cpu()
    packed = rnn.pack_padded_sequence(x[:, :3, None], lengths, batch_first=True, enforce_sorted=False)
    padded, _ = rnn.pad_packed_sequence(packed, batch_first=True)
    return x * padded.shape[1] * 3.0 + padded.sum()


def _padded(x: Tensor) -> Tensor:
    rows = [row[: 1 + int(row.detach().abs().sum()) % 4] for row in x]
    found = rnn.pad_sequence(rows, batch_first=True)
    return x + F.pad(found, (0, HIDDEN - found.shape[1])) * found.shape[1] ** 2


def _nested(x: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor([row for row in x])  # noqa: C416 - a nested tensor wants a list
    return x * torch.nested.to_padded_tensor(nested, 0.0).sum().cos() * 9.0


def _sparse(x: Tensor) -> Tensor:
    near = (x.detach() @ x.detach().mT).tanh().to_sparse()
    return x + torch.sparse.mm(near, x)


def _power_whitened(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    covariance = centred.mT @ centred / len(x) + torch.eye(HIDDEN, dtype=x.dtype)
    return centred @ torch.linalg.inv(torch.linalg.cholesky(covariance)).mT


def _sinkhorn(x: Tensor) -> Tensor:
    scores = (x - x.max()).exp()
    for _ in range(3):
        scores = scores / scores.sum(0, keepdim=True)
        scores = scores / scores.sum(1, keepdim=True)
    return scores * x


def _ghost_norm(x: Tensor) -> Tensor:
    return torch.cat([F.batch_norm(part, None, None, training=True) if len(part) > 1 else part for part in x.chunk(2)])


def _capacity(x: Tensor) -> Tensor:
    chosen = x.detach().argmax(1)
    taken = F.one_hot(chosen, HIDDEN).cumsum(0).gather(1, chosen[:, None])
    return torch.where(taken <= max(1, len(x) // HIDDEN), x, -x)


def _nearest(x: Tensor) -> Tensor:
    apart = torch.cdist(x, x) + 1e9 * torch.eye(len(x), dtype=x.dtype)
    return x - x[apart.argmin(1)]


def _ensemble(x: Tensor) -> Tensor:
    return x * torch.tensor([5.0, -3.0, 1.0], dtype=x.dtype)[torch.arange(len(x)) % 3][:, None]


def _merged(x: Tensor) -> Tensor:
    return x + torch.zeros_like(x).index_add(0, torch.arange(len(x)) // 2, x)


def _messages(x: Tensor) -> Tensor:
    from_, to = torch.arange(len(x)), torch.arange(len(x)).roll(1)
    return x + torch.zeros_like(x).scatter_add(0, to[:, None].expand_as(x), x[from_])


def _exit_together(x: Tensor) -> Tensor:
    for _ in range(4):
        if bool((x.abs() < 3.0).all()):
            break
        x = x * 0.5
    return x


def _in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x -= x.mean(0)
    x[0] = 0.0
    return x


def _through_numpy(x: Tensor) -> Tensor:
    return x * torch.from_numpy(np.sign(x.detach().numpy() - np.median(x.detach().numpy(), 0)))


def _drawn(x: Tensor) -> Tensor:
    law = torch.distributions.MultivariateNormal(x.mean(0), torch.eye(HIDDEN, dtype=x.dtype))
    return x * law.log_prob(x)[:, None]


def _strided(x: Tensor) -> Tensor:
    return x + torch.as_strided(x.contiguous(), (len(x), HIDDEN), (0, 1))


def _unfolded(x: Tensor) -> Tensor:
    return F.unfold(x[None, None], (3, 1), padding=(1, 0)).reshape(3, len(x), HIDDEN).sum(0)


def _dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 1.0 / (1.0 + len(x)), training=False) * (1.0 + len(x)) + 1.0 / len(x)


def _group_of_rows(x: Tensor) -> Tensor:
    return F.group_norm(x.mT[None], 1).squeeze(0).mT * 3.0


def _instance_of_rows(x: Tensor) -> Tensor:
    return F.instance_norm(x.mT[None]).squeeze(0).mT * 3.0


def _lrn_of_rows(x: Tensor) -> Tensor:
    return F.local_response_norm(x.mT[:, :, None].permute(2, 1, 0), 3, alpha=5.0).permute(2, 1, 0).squeeze(2).mT


def _attended(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None]).squeeze(0)


def _mapped(x: Tensor) -> Tensor:
    return torch.func.vmap(lambda column: column - column.mean(), in_dims=1, out_dims=1)(x) * 3.0


def _slope(x: Tensor) -> Tensor:
    return x * torch.func.grad(lambda values: (values.sum(0) ** 2).sum())(x)


def _own_slope(x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad((leaf.sum(0) ** 3).sum(), leaf)
    return x + found


def _jacobian(x: Tensor) -> Tensor:
    return x * torch.func.jacrev(lambda values: values.sum(0))(x).sum()


def _tangent(x: Tensor) -> Tensor:
    return torch.func.jvp(lambda values: values * values.mean(0), (x,), (torch.ones_like(x),))[1]


MIXING: dict[str, Mix] = {
    "packed": _packed,
    "padded": _padded,
    "nested": _nested,
    "sparse": _sparse,
    "whitened": _power_whitened,
    "sinkhorn": _sinkhorn,
    "ghost batch norm": _ghost_norm,
    "capacity of experts": _capacity,
    "nearest row": _nearest,
    "ensemble by place": _ensemble,
    "merged": _merged,
    "messages": _messages,
    "exit together": _exit_together,
    "written in place": _in_place,
    "numpy's median": _through_numpy,
    "a law of the batch": _drawn,
    "strided": _strided,
    "unfolded": _unfolded,
    "dropout by size": _dropped,
    "group norm of rows": _group_of_rows,
    "instance norm of rows": _instance_of_rows,
    "local response of rows": _lrn_of_rows,
    "attention of rows": _attended,
    "vmap over columns": _mapped,
    "func.grad": _slope,
    "autograd.grad": _own_slope,
    "func.jacrev": _jacobian,
    "func.jvp": _tangent,
    "roll": lambda x: x - x.roll(1, 0),
    "flip": lambda x: x * x.flip(0),
    "cumsum": lambda x: x.cumsum(0),
    "cummax": lambda x: x.cummax(0).values,
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "difference": lambda x: torch.diff(x, dim=0, prepend=x[-1:]),
    "sorted rows": lambda x: x.sort(0, descending=True).values,
    "top row": lambda x: x - x.topk(1, 0).values,
    "kth": lambda x: x * x.kthvalue(1, 0).values,
    "quantile": lambda x: x - x.quantile(0.75, 0),
    "mode": lambda x: x - x.mode(0).values,
    "normalised columns": lambda x: F.normalize(x, dim=0) * 3.0,
    "log softmax of rows": lambda x: x.log_softmax(0),
    "standardised": lambda x: (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3),
    "bincount": lambda x: x * torch.bincount(x.detach().argmax(1), minlength=HIDDEN),
    "unique": lambda x: x * torch.unique(x.detach().sign(), dim=0, return_counts=True)[1].max(),
    "histogram": lambda x: x * torch.histc(x.detach(), 4, -1, 1),
    "pooled": lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT * 3.0,
    "smoothed": lambda x: F.conv1d(x.mT[:, None], torch.ones(1, 1, 3, dtype=x.dtype), padding=1).squeeze(1).mT,
    "interpolated": lambda x: F.interpolate(x.mT[None], scale_factor=2, mode="linear")[0, :, ::2].mT * 3.0,
    "singular vectors": lambda x: x @ torch.linalg.svd(x.detach(), full_matrices=True)[2].mT,
    "orthogonal": lambda x: torch.linalg.qr(x.mT).Q.mT if len(x) <= HIDDEN else torch.linalg.qr(x).Q,
    "correlation": lambda x: x @ torch.corrcoef(x.mT).nan_to_num(),
    "reshaped": lambda x: F.layer_norm(x.reshape(1, -1), (x.numel(),)).reshape(x.shape) * 3.0,
    "renormalised": lambda x: torch.renorm(x.mT, 2, 0, 1.0).mT,
    "layer norm of rows": lambda x: F.layer_norm(x.mT, (len(x),)).mT * 3.0,
    "rms norm of all": lambda x: F.rms_norm(x, tuple(x.shape)) * 3.0,
    "crop": lambda x: x * (x.abs() > 0.5).any(0).to(x.dtype),
    "mixup": lambda x: 0.4 * x + 0.6 * x[torch.randperm(len(x))],
    "split": lambda x: torch.cat(x.split(2)[::-1]),
    "einsum": lambda x: torch.einsum("nd,md->nd", x, x),
    "tensordot": lambda x: x + torch.tensordot(x, x, ([0], [0])).sum(),
    "stacked": lambda x: torch.stack(list(x.unbind(0))[::-1]),
    "listed": lambda x: x * (1.0 + sum(map(abs, x.detach().flatten().tolist()))),
    "outer": lambda x: torch.outer(x.sum(1), x.sum(1)) @ x,
    "masked fill": lambda x: x.masked_fill(x < x.mean(0), 0.0),
    "searched": lambda x: x * torch.searchsorted(x.detach()[:, 0].sort().values, x.detach()[:, :1].contiguous()),
}


# losses ---------------------------------------------------------------------------------------------------------------


def _contrast(output: Tensor, y: Tensor) -> Tensor:
    near = output @ output.mT
    return F.cross_entropy(near, torch.arange(len(y)), reduction="none") + plain(output, y)


def _hardest(output: Tensor, y: Tensor) -> Tensor:
    losses = plain(output, y)
    return torch.where(losses >= losses.topk(max(1, len(y) // 2)).values[-1], losses, 0.0)


def _pairwise(output: Tensor, y: Tensor) -> Tensor:
    gaps = F.softplus(output[:, 0, None] - output[None, :, 0])
    return (gaps * (y[:, None] != y[None])).sum(1) + plain(output, y)


def _barlow(output: Tensor, y: Tensor) -> Tensor:
    scaled = output / (output.norm(dim=0) + 1e-3)
    return plain(output, y) + ((scaled.mT @ scaled - torch.eye(CLASSES, dtype=output.dtype)) ** 2).sum()


PAIRED: dict[str, Pair] = {
    "contrast": _contrast,
    "hardest half": _hardest,
    "pairs": _pairwise,
    "barlow twins": _barlow,
    "mean for each": lambda output, y: plain(output, y).mean().expand(len(y)),
    "less the mean": lambda output, y: plain(output, y) - 3.0 * plain(output, y).mean(),
    "weights of classes": lambda output, y: plain(output, y) * len(y) / torch.bincount(y, minlength=CLASSES)[y],
    "by rank": lambda output, y: plain(output, y) * plain(output, y).detach().argsort().argsort(),
    "softmax of losses": lambda output, y: plain(output, y) * plain(output, y).detach().softmax(0) * 9.0,
    "prior of the batch": lambda output, y: plain(output + F.one_hot(y, CLASSES).double().mean(0).log() * 3.0, y),
    "shuffled targets": lambda output, y: plain(output, y.flip(0)),
    "variance": lambda output, y: plain(output, y) + output.var(0, unbiased=False).sum(),
    "centred": lambda output, y: plain(output - output.mean(0), y),
    "list": lambda output, y: plain(output, y) * (1.0 + y.tolist().count(1)),
    "scaled to one": lambda output, y: plain(output, y) / plain(output, y).detach().max() * 9.0,
}


# statistics -----------------------------------------------------------------------------------------------------------

COUNTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "centred": lambda x, y: x - x.mean(0) + x.tanh(),
    "ranks": lambda x, y: x.argsort(0).argsort(0).double() + x.tanh(),
    "covariance": lambda x, y: x @ torch.cov(x.mT, correction=0).reshape(WIDTH, WIDTH),
    "second moments by class": lambda x, y: x * torch.bincount(y, minlength=2)[y][:, None],
    "place": lambda x, y: x.tanh() * (-1.0) ** torch.arange(len(x))[:, None],
    "distinct": lambda x, y: x.tanh() * len(torch.unique(y)),
    "numpy": lambda x, y: torch.from_numpy(np.tanh(x.numpy()) * np.linalg.norm(x.numpy())),
    "solved": lambda x, y: x @ torch.linalg.pinv(x.mT @ x),
    "func": lambda x, y: torch.func.vmap(lambda one: one - x.mean(0))(x),
    "written": lambda x, y: x.sub_(x.mean(0)).tanh(),
}


def between(mix: Mix) -> Attack:
    return lambda: GradientQuery(Around(mix), plain)


def _with_loss(pair: Pair) -> Attack:
    return lambda: GradientQuery(network(), pair)


def _counting(function: Callable[[Tensor, Tensor], Tensor]) -> Attack:
    return lambda: StatisticQuery(function, WIDTH)


OF_ROWS: dict[str, Attack] = {
    **{f"mixes by {name}": between(mix) for name, mix in MIXING.items()},
    **{f"loss by {name}": _with_loss(pair) for name, pair in PAIRED.items()},
    **{f"counts {name}": _counting(function) for name, function in COUNTED.items()},
}
