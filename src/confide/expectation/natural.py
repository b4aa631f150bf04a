"""Exponential families in natural parameters: Gaussians with full, diagonal or scalar precision, and the Gamma.

A Gaussian factor is exp(eta'w - w' Lambda w / 2). Multiplying factors adds (eta, Lambda), dividing subtracts them, so
expectation propagation works on one vector per factor. Packing is an isometry: the norm of the vector is

    |theta|^2 = |eta|^2 + |Lambda|_F^2,

so an off-diagonal entry, which stands twice in Lambda, is stored once times sqrt 2, and a scalar precision lambda I in
d dimensions as sqrt(d) lambda. A clip of the vector is then a clip of the natural parameters themselves, all together.

All functions are batched over leading axes and work in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from confide.errors import Refusal

Covariance: TypeAlias = Literal["full", "diagonal", "scalar"]
COVARIANCES: tuple[Covariance, ...] = get_args(Covariance)
_ROOT_TWO = math.sqrt(2)


def packed_size(dimension: int, covariance: Covariance) -> int:
    """Numbers in one packed precision."""
    return {"full": dimension * (dimension + 1) // 2, "diagonal": dimension, "scalar": 1}[covariance]


def signed_axes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors whose signs no machine decides: libraries give either, and with a seed what is drawn
    along them would follow. Each points the way of one fixed vector, to which none is orthogonal but by chance."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    way = torch.cos(torch.arange(1.0, matrix.shape[-1] + 1, dtype=matrix.dtype, device=matrix.device))
    signs = torch.where((way[:, None] * vectors).sum(-2, keepdim=True) < 0, -1.0, 1.0).to(vectors)
    return values, vectors * signs


def pack_symmetric(matrix: Tensor) -> Tensor:
    """A symmetric matrix as a vector of the same norm: the diagonal, then the upper triangle times sqrt 2."""
    rows, columns = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], 1)
    diagonal = torch.diagonal(matrix, dim1=-2, dim2=-1)
    return torch.cat([diagonal, _ROOT_TWO * matrix[..., rows, columns]], -1)


def unpack_symmetric(vector: Tensor, dimension: int) -> Tensor:
    """The inverse of `pack_symmetric`."""
    rows, columns = torch.triu_indices(dimension, dimension, 1)
    matrix = torch.diag_embed(vector[..., :dimension])
    above = vector[..., dimension:] / _ROOT_TWO
    matrix[..., rows, columns] = above
    matrix[..., columns, rows] = above
    return matrix


@dataclass(frozen=True)
class GaussianFamily:
    """`copies` independent Gaussians over R^dimension as one vector [eta, packed Lambda].

    A precision is a matrix (..., copies, d, d), its diagonal (..., copies, d) or one number (..., copies), as
    `covariance` says.
    """

    dimension: int
    covariance: Covariance = "full"
    copies: int = 1

    def __post_init__(self) -> None:
        if self.dimension < 1 or self.copies < 1:
            raise Refusal(f"dimension={self.dimension}, copies={self.copies}: both must be at least 1")
        if self.covariance not in COVARIANCES:
            raise Refusal(f"covariance={self.covariance!r}: must be one of {', '.join(COVARIANCES)}")

    @property
    def locations(self) -> int:
        """Numbers in eta."""
        return self.copies * self.dimension

    @property
    def size(self) -> int:
        """Numbers in the vector."""
        return self.locations + self.copies * packed_size(self.dimension, self.covariance)

    def pack(self, eta: Tensor, precision: Tensor) -> Tensor:
        """One isometric vector from eta (..., copies, d) and the precision."""
        if self.covariance == "full":
            packed = pack_symmetric(precision)
        elif self.covariance == "diagonal":
            packed = precision
        else:
            packed = math.sqrt(self.dimension) * precision[..., None]
        return torch.cat([eta.flatten(-2), packed.flatten(-2)], -1)

    def unpack(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """eta and the precision."""
        eta = vector[..., : self.locations].unflatten(-1, (self.copies, self.dimension))
        packed = vector[..., self.locations :].unflatten(-1, (self.copies, -1))
        if self.covariance == "full":
            return eta, unpack_symmetric(packed, self.dimension)
        if self.covariance == "diagonal":
            return eta, packed
        return eta, packed[..., 0] / math.sqrt(self.dimension)

    def dense(self, parameter: Tensor) -> Tensor:
        """A precision or a covariance as matrices (..., copies, d, d)."""
        if self.covariance == "full":
            return parameter
        if self.covariance == "diagonal":
            return torch.diag_embed(parameter)
        return parameter[..., None, None] * torch.eye(self.dimension, dtype=parameter.dtype)

    def restricted(self, matrix: Tensor) -> Tensor:
        """What the family keeps of a covariance when moments are matched: all, the diagonal, or the mean diagonal."""
        if self.covariance == "full":
            return matrix
        diagonal = torch.diagonal(matrix, dim1=-2, dim2=-1)
        return diagonal if self.covariance == "diagonal" else diagonal.mean(-1)

    def inverse(self, parameter: Tensor) -> Tensor:
        """Precision to covariance and back."""
        if self.covariance == "full":
            return torch.cholesky_inverse(torch.linalg.cholesky(parameter))
        return parameter.reciprocal()

    def times(self, parameter: Tensor, vector: Tensor) -> Tensor:
        """A precision or covariance applied to vectors (..., copies, d)."""
        if self.covariance == "full":
            return (parameter @ vector[..., None])[..., 0]
        return parameter * vector if self.covariance == "diagonal" else parameter[..., None] * vector

    def moments(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (..., copies, d) and covariance, in the family's own shape."""
        eta, precision = self.unpack(vector)
        covariance = self.inverse(precision)
        return self.times(covariance, eta), covariance

    def from_moments(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """The member with this mean and covariance (in the family's own shape)."""
        precision = self.inverse(covariance)
        return self.pack(self.times(precision, mean), precision)

    def project(self, vector: Tensor, least: float) -> Tensor:
        """Raise every eigenvalue of the precision below `least` to it; eta stays. Post-processing of a release."""
        if not least > 0:
            raise Refusal(f"least={least}: must be > 0")
        eta, precision = self.unpack(vector)
        return self.pack(eta, self.between(precision, least, math.inf))

    def between(self, precision: Tensor, least: float, most: float) -> Tensor:
        """The nearest precision with every eigenvalue between `least` and `most`."""
        if self.covariance != "full":
            return precision.clamp(least, most)
        values, vectors = torch.linalg.eigh((precision + precision.mT) / 2)
        kept: Tensor = (vectors * values.clamp(least, most)[..., None, :]) @ vectors.mT
        return kept

    def sample(self, vector: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """`count` draws of shape (count, copies * d) from one member."""
        _, precision = self.unpack(vector)
        noise = torch.randn(count, self.copies, self.dimension, generator=generator, dtype=vector.dtype)
        if self.covariance == "full":
            factor = torch.linalg.cholesky(precision)
            # With Lambda = L L', the vector L'^-1 z has covariance Lambda^-1.
            spread = torch.linalg.solve_triangular(factor.mT, noise[..., None], upper=True)[..., 0]
        else:
            root = precision.rsqrt()
            spread = noise * (root if self.covariance == "diagonal" else root[..., None])
        draws: Tensor = (self.moments(vector)[0] + spread).flatten(1)
        return draws

    def divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """KL(p || q) = 1/2 sum over copies of [tr(Lq Sp) + (mq - mp)' Lq (mq - mp) - d + log |Lp| / |Lq|]."""
        mean_p, covariance_p = self.moments(p)
        mean_q, _ = self.moments(q)
        precision_p, precision_q = self.dense(self.unpack(p)[1]), self.dense(self.unpack(q)[1])
        gap = mean_q - mean_p
        trace = (precision_q * self.dense(covariance_p)).sum((-2, -1))
        distance = ((precision_q @ gap[..., None])[..., 0] * gap).sum(-1)
        volume = torch.logdet(precision_p) - torch.logdet(precision_q)
        return 0.5 * (trace + distance - self.dimension + volume).sum(-1)


def least_eigenvalue(family: GaussianFamily, theta: Tensor) -> float:
    """The smallest eigenvalue of the precision of one member."""
    _, precision = family.unpack(theta)
    return float(torch.linalg.eigvalsh(family.dense(precision)).min())


@dataclass(frozen=True)
class GammaFamily:
    """Gamma(shape a, rate b) as the vector [a - 1, b]: exp((a - 1) log g - b g)."""

    @property
    def size(self) -> int:
        return 2

    def pack(self, shape: Tensor, rate: Tensor) -> Tensor:
        return torch.stack([shape - 1, rate], -1)

    def unpack(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        return vector[..., 0] + 1, vector[..., 1]

    def moments(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """E[g] and E[g^2]."""
        shape, rate = self.unpack(vector)
        return shape / rate, shape * (shape + 1) / rate.square()

    def from_moments(self, first: Tensor, second: Tensor) -> Tensor:
        """The member with these first two moments, as PBP matches them (Hernandez-Lobato and Adams 2015, eq. 13)."""
        variance = second - first.square()
        return self.pack(first.square() / variance, first / variance)

    def project(self, vector: Tensor, least: float) -> Tensor:
        """Shape above 1, so that the mean of 1/g is finite, and a rate of at least `least`."""
        shape, rate = self.unpack(vector)
        return self.pack(shape.clamp(min=1 + least), rate.clamp(min=least))

    def divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """KL(p || q)."""
        (shape_p, rate_p), (shape_q, rate_q) = self.unpack(p), self.unpack(q)
        volumes = torch.lgamma(shape_q) - torch.lgamma(shape_p) + shape_q * (rate_p / rate_q).log()
        return (shape_p - shape_q) * torch.digamma(shape_p) + volumes + shape_p * (rate_q - rate_p) / rate_p


@dataclass(frozen=True)
class LocalChart:
    """Natural parameters in the units of the present approximation q = N(m, S): those of u with w = m + S^(1/2) u.

        eta_u = S^(1/2) (eta - Lambda m),        Lambda_u = weight * S^(1/2) Lambda S^(1/2).

    The map is linear and public, so a clip of (eta_u, Lambda_u) bounds the sensitivity like a clip of (eta, Lambda). In
    these units q is N(0, I): noise of standard deviation s moves every mean by s posterior standard deviations, however
    well or badly it is determined. (With weight = 1 / sqrt 2 the Euclidean metric is the Fisher metric at q.)

    unit   coordinates are divided by it
    least  smallest eigenvalue of a precision; trust: largest factor by which it may change in one step
    """

    family: GaussianFamily
    theta: Tensor
    least: float
    weight: float = 1 / _ROOT_TWO
    unit: float = 1.0
    trust: float = 4.0

    @property
    def size(self) -> int:
        """Numbers in an answer."""
        return self.family.size

    def encode(self, differences: Tensor) -> Tensor:
        eta, precision = self.family.unpack(differences)
        centred = self.family.times(self._root, eta - self.family.times(precision, self._mean))
        return self.family.pack(centred, self.weight * self._sandwich(self._root, precision)) / self.unit

    def decode(self, coordinates: Tensor) -> Tensor:
        """The inverse of `encode`."""
        centred, scaled = self.family.unpack(coordinates * self.unit)
        back = self.family.inverse(self._root)
        precision = self._sandwich(back, scaled) / self.weight
        return self.family.pack(self.family.times(back, centred) + self.family.times(precision, self._mean), precision)

    def advance(self, coordinates: Tensor) -> Tensor:
        """The next approximation: a step about the present mean, short enough for the precision's trust region.

        Mean and precision are shortened together, copy by copy: records that say much about the mean say as much about
        its precision, and to believe one without the other would throw the mean far beyond them.
        """
        family = self.family
        step, scaled = family.unpack(coordinates * self.unit)
        unit = family.restricted(torch.eye(family.dimension, dtype=coordinates.dtype).expand(family.copies, -1, -1))
        share = self._share(scaled / self.weight)
        precision = unit + share.reshape(-1, *[1] * (scaled.ndim - 1)) * scaled / self.weight
        step = share[:, None] * step
        mean = self._mean + family.times(self._root, family.times(family.inverse(precision), step))
        whole = self._sandwich(family.inverse(self._root), precision)
        whole = family.between(whole, self.least, math.inf)
        return family.pack(family.times(whole, mean), whole)

    def _share(self, change: Tensor) -> Tensor:
        """How much of a step, one number per copy, keeps 1 + change between 1 / trust and trust."""
        values = torch.linalg.eigvalsh(self.family.dense(change))
        growth = (self.trust - 1) / values.amax(-1).clamp(min=1e-300)
        fall = (1 - 1 / self.trust) / (-values.amin(-1)).clamp(min=1e-300)
        return torch.minimum(growth, fall).clamp(max=1.0)

    @cached_property
    def _mean(self) -> Tensor:
        return self.family.moments(self.theta)[0]

    @cached_property
    def _root(self) -> Tensor:
        _, covariance = self.family.moments(self.theta)
        if self.family.covariance != "full":
            return covariance.sqrt()
        values, vectors = torch.linalg.eigh(covariance)
        root: Tensor = (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT
        return root

    def _sandwich(self, root: Tensor, precision: Tensor) -> Tensor:
        if self.family.covariance == "full":
            return root @ precision @ root
        return root * precision * root
