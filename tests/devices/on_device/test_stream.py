"""Noise that is made on the device: the same words as the host's, normals that are normal, keys that never repeat."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from confide.devices import normals, stream
from confide.mechanism.noise import NoiseStream

pytestmark = pytest.mark.gpu
LONG = stream.WORTH_IT


def openssl(key: bytes, first: int, blocks: int) -> Tensor:
    nonce = first.to_bytes(8, "little") + bytes(8)
    content = Cipher(algorithms.ChaCha20(key, nonce), None).encryptor().update(bytes(64 * blocks))
    return torch.from_numpy(np.frombuffer(content, dtype="<i4").reshape(blocks, 16).T.copy())


@pytest.mark.parametrize("first", [0, 3, 2**31 - 7])
def test_words_are_those_of_openssl_bit_by_bit(first: int, device: torch.device) -> None:
    key = os.urandom(32)
    assert torch.equal(stream.words(key, first, 7, device).cpu(), openssl(key, first, 7))
    assert not torch.equal(stream.words(key, first, 7, device).cpu(), openssl(os.urandom(32), first, 7))


def test_a_key_ends_before_its_counter_does(device: torch.device) -> None:
    with pytest.raises(ValueError, match="take another key"):
        stream.words(bytes(32), 2**31 - 6, 7, device)


def test_normals_are_those_of_the_host(device: torch.device) -> None:
    key = os.urandom(32)
    here, there = (stream.normal_(torch.empty(10_001, device=place), 3.0, key) for place in ("cpu", device))
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-4)


def test_the_refinement_reaches_the_tail() -> None:
    """U from 2^-95 to 1 - 2^-31: the radius at both ends, and in between without a step."""
    words = torch.zeros(16, 3, dtype=torch.int32)
    words[0:4, 1], words[0:4, 2] = 2 * 1023, 0x7FFFFFFF  # the last refined j, and the largest U
    words[4:8, 1] = words[8:12, 1] = -1  # all further bits set
    radius = stream.box_muller(words)[:12].view(4, 3)[0]  # the angle is 0
    expected = [math.sqrt(2 * 95 * math.log(2)), math.sqrt(2 * 20 * math.log(2)), math.sqrt(2 * 2.0**-31)]
    torch.testing.assert_close(radius, torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_a_stream_fills_the_device_in_law(device: torch.device) -> None:
    from scipy import stats

    noise = NoiseStream()
    values = noise.normal_(torch.empty(LONG, device=device), 2.0)
    found = values.cpu().double().numpy() / 2
    assert stats.kstest(found, "norm").pvalue > 1e-6
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 6 / math.sqrt(LONG)
    assert stats.kstest(1.02 * found, "norm").pvalue < 1e-3  # two per cent off is caught
    again = noise.normal_(torch.empty(LONG, device=device), 2.0).cpu()
    assert not torch.isin(again, values.cpu()).float().mean() > 0.01


def test_short_vectors_and_double_precision_come_from_the_host(device: torch.device) -> None:
    for size, dtype in ((100, torch.float32), (100, torch.float64), (LONG, torch.float64)):
        here, there = NoiseStream(5), NoiseStream(5)
        expected = here.normal_(torch.empty(size, dtype=dtype), 1.5)
        assert torch.equal(there.normal_(torch.empty(size, dtype=dtype, device=device), 1.5).cpu(), expected)


def test_seeded_streams_repeat_and_others_do_not(device: torch.device) -> None:
    one, two = (NoiseStream(3).normal_(torch.empty(LONG, device=device), 1.0).cpu() for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(NoiseStream().normal_(torch.empty(LONG, device=device), 1.0).cpu(), one)


def test_the_draws_of_a_method_follow_its_generator(device: torch.device) -> None:
    for size in (50, LONG):
        one, two = (normals((size,), torch.Generator().manual_seed(1), torch.float32, device) for _ in range(2))
        assert one.device == device
        assert torch.equal(one.cpu(), two.cpu())
        assert abs(float(one.cpu().std()) - 1) < 0.5
