"""What a device gains: python -m benchmarks.devices [--device cuda]

One step of clipping and noise, noise alone, and a prediction, each on the host and on the device, as times of the host
over times of the device (above 1: the device is faster). Without a device it compares the host with itself, which
shows the spread of the measurement.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.devices import HOST, named
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.noise import NoiseStream
from confide.models.likelihoods import Categorical
from confide.posteriors.draws import Draws

ROUNDS = 5


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    images = torch.rand(256, 1, 28, 28) * 2 - 1
    convolutions = nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    wide = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1200), nn.ReLU(), nn.Linear(1200, 1200), nn.ReLU(), nn.Linear(1200, 10)
    )
    return {"convolutions, 26 000 weights": (convolutions, images), "wide layers, 2.4 million": (wide, images)}


def measured(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: the median of a few, after one that warms up."""
    times = []
    for _ in range(ROUNDS + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type != HOST.type:
        torch.get_device_module(device).synchronize()


def plain_step(network: nn.Module, x: Tensor, y: Tensor) -> None:
    network.zero_grad()
    F.cross_entropy(network(x), y).backward()


def private_step(network: nn.Module, x: Tensor, y: Tensor, noise: NoiseStream, out: Tensor) -> None:
    noise.normal_(out, 1.0)
    clipped_sum(network, Categorical(10).loss, x, y, clip=1.0, out=out)


def steps(device: torch.device) -> dict[str, Callable[[], Any]]:
    """What is measured, on one device."""
    torch.manual_seed(0)
    found: dict[str, Callable[[], Any]] = {}
    noise = NoiseStream()
    for name, (network, images) in networks().items():
        network.to(device)
        x, y = images.to(device), (torch.arange(len(images)) % 10).to(device)
        size = sum(value.numel() for value in network.parameters())
        posterior = Draws(network, Categorical(10), torch.randn(10, size) / 30, torch.full((10,), 0.1))
        found[f"plain step, {name}"] = partial(plain_step, network, x, y)
        found[f"private step, {name}"] = partial(private_step, network, x, y, noise, torch.zeros(size, device=device))
        found[f"prediction of 10 draws, {name}"] = partial(posterior.summary, images)
    found["10 million normals"] = partial(noise.normal_, torch.empty(10_000_000, device=device), 1.0)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = named(parser.parse_args(arguments).device, "--device")
    print(f"{'':45}  host / {device.type}")
    for (name, here), there in zip(steps(HOST).items(), steps(device).values(), strict=True):  # turn by turn
        print(f"{name:45}  {measured(here, HOST) / measured(there, device):8.2f}", flush=True)


if __name__ == "__main__":
    main()
