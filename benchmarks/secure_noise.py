"""The price of noise on a lattice: `python -m benchmarks.secure_noise [--json] [--quick] [--one-thread]`.

A whole private step of a 784-1200-1200-10 network (2.4 million parameters) with batches of 256: clipped sum and noise,
with ordinary noise (the reference) and with `secure=True`; and the noise by itself.
"""

from __future__ import annotations

import torch

from benchmarks import _harness
from benchmarks._harness import Clock, Report, Step
from benchmarks._models import cross_entropy, mlp
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.mechanism.secure import LatticeNoise

BATCH = 256
MECHANISM = SampledGaussian(1.3, 1.0, BATCH / 60_000, 60_000)
PROMISED = 1.5


def step(secure: bool) -> Step:
    torch.manual_seed(0)
    module = mlp(784, 1200, 1200, 10)
    x, y = torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,))
    total = torch.empty(sum(parameter.numel() for parameter in module.parameters()))
    stream = NoiseStream()
    lattice = LatticeNoise(stream)

    def ordinary_step() -> None:
        stream.normal_(total, MECHANISM.noise_std)
        clipped_sum(module, cross_entropy, x, y, clip=1.0, out=total)

    def secure_step() -> None:
        clipped_sum(module, cross_entropy, x, y, clip=1.0, out=total.zero_())
        lattice.add_(total, MECHANISM)

    return secure_step if secure else ordinary_step


def noise_alone(secure: bool) -> Step:
    total, stream = torch.zeros(2_395_210), NoiseStream()
    lattice = LatticeNoise(stream)

    def ordinary() -> None:
        stream.normal_(total, MECHANISM.noise_std)

    def on_lattice() -> None:
        lattice.add_(total.zero_(), MECHANISM)

    return on_lattice if secure else ordinary


def run(seconds: float, clock: Clock) -> Report:
    result: Report = {"machine": _harness.machine()}
    _harness.warn_if_busy(result["machine"])
    for name, make in (("step", step), ("noise", noise_alone)):
        makers = {"default": lambda make=make: make(False), "secure": lambda make=make: make(True)}
        result[name] = _harness.race(makers, seconds / 2, "default", clock)
    result["promised"] = PROMISED
    return result


def show(result: Report) -> None:
    _harness.print_table(f"one step (secure is promised at {PROMISED} at most)", result["step"])
    _harness.print_table("the noise alone", result["noise"])


if __name__ == "__main__":
    _harness.main(__doc__, run, (6.0, 30.0), show)
