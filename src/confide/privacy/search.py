"""Root finding for calibration: few evaluations of a costly monotone function, and never on the wrong side."""

from __future__ import annotations

import math
from collections.abc import Callable

from confide.errors import Refusal

# Epsilon is reached to within this fraction, from below.
TOLERANCE = 1e-5
_LARGEST = 1e12  # noise beyond any use; the search has to end


def smallest_noise(cost: Callable[[float], float], target: float, start: float, stride: float = 0.1) -> float:
    """The smallest noise with cost(noise) <= target, where cost falls as noise grows.

    The answer always satisfies cost <= target, and cost >= (1 - TOLERANCE) target unless the cost jumps there.
    The search begins with a step of `stride` times the start, so a good start deserves a small one. In logarithms
    the curve is close to a straight line, and regula falsi (Illinois form) needs few evaluations.
    """

    def excess(log_noise: float) -> float:
        return _log(cost(math.exp(log_noise))) - math.log(target)

    low, high = _bracket(excess, math.log(start), stride)
    goal = 0.5 * math.log1p(-TOLERANCE)  # aim just below the target
    (x0, y0), (x1, y1) = low, high
    side = 0
    for iteration in range(60):
        if math.log1p(-TOLERANCE) <= high[1] <= 0 or x1 - x0 < 1e-13 * max(1.0, abs(x1)):
            break
        x = x1 + (goal - y1) * (x0 - x1) / (y0 - y1) if iteration % 8 < 6 else (x0 + x1) / 2
        x = min(max(x, x0 + 1e-3 * (x1 - x0)), x1 - 1e-3 * (x1 - x0))
        y = excess(x)
        if y > goal:
            # The same end moved twice: halve the weight of the other, lest the search creep.
            y1 = goal + (y1 - goal) / 2 if side == 1 and high[1] < goal else y1
            x0, y0, side = x, y, 1
            if y <= 0:
                high = (x, y)
        else:
            y0 = goal + (y0 - goal) / 2 if side == -1 else y0
            x1, y1, side = x, y, -1
            high = (x, y)
    return math.exp(high[0])


Point = tuple[float, float]


def _bracket(excess: Callable[[float], float], start: float, stride: float) -> tuple[Point, Point]:
    """Two points around the root, found by growing steps from the start; the second has excess <= 0."""
    point = (start, excess(start))
    while abs(stride) < 2 * math.log(_LARGEST):
        direction = 1 if point[1] > 0 else -1
        x = point[0] + direction * stride
        other = (x, excess(x))
        if other[1] <= 0 < point[1]:
            return point, other
        if point[1] <= 0 < other[1]:
            return other, point
        point, stride = other, 3 * stride
    raise Refusal("no noise multiplier between 1e-12 and 1e12 reaches the target epsilon; choose another epsilon")


def most_steps(cost: Callable[[int], float], target: float, start: int, limit: int) -> int:
    """The largest number of steps with cost(steps) <= target, where cost grows; 0 if one step is too many."""
    if cost(1) > target:
        return 0
    low, high = 1, min(max(start, 2), limit)
    low_cost, high_cost = cost(low), cost(high)
    while high_cost <= target:
        if high >= limit:
            return limit
        low, low_cost = high, high_cost
        high = min(2 * high, limit)
        high_cost = cost(high)
    iteration = 0
    while high - low > 1:
        guess = _between(low, low_cost, high, high_cost, target) if iteration % 3 < 2 else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        value = cost(middle)
        if value <= target:
            low, low_cost = middle, value
        else:
            high, high_cost = middle, value
        iteration += 1
    return low


def _between(low: int, low_cost: float, high: int, high_cost: float, target: float) -> int:
    """Where a straight line in log steps and log cost meets the target."""
    y0, y1 = _log(low_cost), _log(high_cost)
    if y1 <= y0:
        return (low + high) // 2
    fraction = (math.log(target) - y0) / (y1 - y0)
    return round(math.exp(math.log(low) + fraction * (math.log(high) - math.log(low))))


def _log(value: float) -> float:
    """Logarithm that stays finite for costs of zero and infinity."""
    return math.log(min(max(value, 1e-12), 1e12))
