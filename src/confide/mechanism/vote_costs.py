"""What votes cost where teachers agree: a function of the votes, watched inside, and released only under noise.

A query whose teachers agree hardly depends on any one of them. With a gap g between the two largest counts of K
classes, noise of deviation s changes the winner with a chance of at most

    q = (K - 1) / 2 erfc(g / (2 s)),

and the Renyi divergence of order a between neighbours is at most (Papernot et al., ICLR 2018, theorem 6, with
mu2 = s sqrt(log 1/q), mu1 = mu2 + 1, e1 = mu1 / s^2, e2 = mu2 / s^2)

    c(g) = 1 / (a - 1) log( (1 - q) A^(a - 1) + q B^(a - 1) ),
    A = (1 - q) / (1 - (q e^e2)^(1 - 1 / mu2)),  B = e^e1 / q^(1 / (mu1 - 1)),

or a / s^2, whatever the votes, where that is less or a condition of the theorem fails. A bound for q holds for every
smaller q, so that c is taken as the least over all smaller gaps: it falls with the gap.

The sum f of c over the queries depends on the records, so it does not leave as it is. One teacher moves every gap by
at most 2; D(g) = c(g - 2) - c(g) is what one query changes by, and

    S = max over d of e^(-b d) sum over queries of max { D(g') : g - 2 d <= g' <= g + 2 d + 2 }

bounds the change of f, and changes itself by at most a factor e^b (Nissim, Raskhodnikova and Smith, STOC 2007). What is
released is f + S / l T, T of Student's law with 3 degrees of freedom, whose density h has |h' / h| <= 2 / sqrt 3, and
-1 <= -1 - z h' / h <= 3. So moving f by S costs 2 l / sqrt 3, scaling S by e^b costs 3 b, and the release is purely
private at their sum, which is charged with the votes.

Noise may make the value too small, and f itself holds for these records and not for all: an epsilon that is made of it
is an estimate. The statement of a run stays the one that holds whatever the votes are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.mechanism.noise import NoiseStream
from confide.privacy.events import PureEvent

SLIDE, STRETCH = 2 / math.sqrt(3), 3.0
"""What moving and scaling Student's law with 3 degrees of freedom cost."""
FREEDOM = 3  # the degrees of freedom that these costs are of; the least with a finite variance
MOST_MOVED = 2
"""How far one teacher moves the gap between the two largest counts: one falls by one and one rises by one."""
ESTIMATE = "an estimate and no bound: it holds for these records only, and was released under noise"


@dataclass(frozen=True)
class CostEstimate:
    """Settings of the release of f, fixed before a record is read.

    order     a, of the Renyi divergence
    epsilon   what the release costs, purely; half of it for moving f and half for scaling S
    """

    order: float
    epsilon: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.order) and self.order > 1):
            raise Refusal(f"order={self.order}: must be a finite number > 1")
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise Refusal(f"epsilon={self.epsilon}: must be a finite number > 0")

    @property
    def smoothness(self) -> float:
        """b: how much S may change between neighbours, as a logarithm."""
        return self.epsilon / 2 / STRETCH

    @property
    def scale(self) -> float:
        """1 / l: deviations of Student's law are S times this."""
        return SLIDE / (self.epsilon / 2)

    def event(self) -> PureEvent:
        return PureEvent(self.epsilon)

    def release(self, counts: Tensor, teachers: int, noise: float, stream: NoiseStream) -> float:
        """f of counts (queries, classes) under noise, kept between 0 and what queries cost whatever the votes."""
        costs = costs_by_gap(teachers, counts.shape[1], noise, self.order)
        gaps = gaps_of(counts)
        moved = smooth_sensitivity(gaps, costs, self.smoothness)
        found = float(costs[gaps].sum()) + self.scale * moved * student(stream)
        return min(max(found, 0.0), len(counts) * self.order / noise**2)


def gaps_of(counts: Tensor) -> Tensor:
    """Votes between the first and the second class of every query."""
    first, second = counts.topk(2, dim=1).values.T if counts.shape[1] > 1 else (counts[:, 0], torch.zeros(len(counts)))
    return (first - second).to(torch.int64)


def costs_by_gap(teachers: int, classes: int, noise: float, order: float) -> Tensor:
    """c for gaps of 0 to `teachers`."""
    found = [_cost(gap, max(1, classes - 1), noise, order) for gap in range(teachers + 1)]
    return torch.tensor(found, dtype=torch.float64).cummin(0).values


def smooth_sensitivity(gaps: Tensor, costs: Tensor, smoothness: float) -> float:
    """S of queries with these gaps."""
    last = len(costs) - 1
    steps = costs[(torch.arange(last + 1) - MOST_MOVED).clamp(min=0)] - costs
    many = torch.bincount(gaps, minlength=last + 1).double()
    reach = _spread(steps, 0, MOST_MOVED)
    largest = 0.0
    for distance in range(last // MOST_MOVED + 2):  # beyond this every gap can be reached
        largest = max(largest, math.exp(-smoothness * distance) * float(many @ reach))
        reach = _spread(reach, MOST_MOVED, MOST_MOVED)
    return largest


def _spread(values: Tensor, below: int, above: int) -> Tensor:
    """The largest value within so many places."""
    padded = torch.nn.functional.pad(values, (below, above))  # with zeros: no step is below
    return padded.unfold(0, below + above + 1, 1).amax(1)


def student(stream: NoiseStream) -> float:
    """A number of Student's law with 3 degrees of freedom."""
    first, *others = stream.normal_(torch.empty(1 + FREEDOM, dtype=torch.float64), 1.0).tolist()
    return float(first / math.sqrt(sum(value**2 for value in others) / FREEDOM))


def _cost(gap: int, others: int, noise: float, order: float) -> float:
    """c of one gap, before the least over smaller ones."""
    whatever = order / noise**2
    log_q = _log_chance(gap, others, noise)
    if log_q >= 0:
        return whatever
    high2 = noise * math.sqrt(-log_q)
    high1, rate2 = high2 + 1, high2 / noise**2
    if high2 <= 1 or high1 < order or -log_q <= rate2:
        return whatever
    room = (high2 - 1) * rate2 - high2 * (math.log1p(1 / (high1 - 1)) + math.log1p(1 / (high2 - 1)))
    if log_q > room:
        return whatever
    stays = math.log1p(-math.exp(log_q))
    log_a = stays - math.log(-math.expm1((log_q + rate2) * (1 - 1 / high2)))
    log_b = high1 / noise**2 - log_q / (high1 - 1)
    both = torch.tensor([stays + (order - 1) * log_a, log_q + (order - 1) * log_b], dtype=torch.float64).logsumexp(0)
    return min(whatever, max(0.0, float(both) / (order - 1)))


def _log_chance(gap: int, others: int, noise: float) -> float:
    """log q: that noise of a difference, of deviation s sqrt 2, exceeds the gap for any other class."""
    return math.log(others) + float(torch.special.log_ndtr(torch.tensor(-gap / (math.sqrt(2) * noise)).double()))


def estimated_epsilon(cost: float, order: float, delta: float) -> float:
    """The epsilon at delta of a Renyi divergence of this order (Canonne, Kamath and Steinke, NeurIPS 2020)."""
    return max(0.0, cost + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
