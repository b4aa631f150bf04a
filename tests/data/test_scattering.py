"""The scattering transform: shapes, what it keeps, what it forgets, and that each image is treated by itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from confide.data.scattering import FREQUENCY, Scattering, littlewood_paley, low_pass, wavelets

SIDE, ANGLES = 28, 8


@pytest.fixture(scope="module")
def transform() -> Scattering:
    return Scattering(SIDE)


@pytest.fixture(scope="module")
def digits() -> Tensor:
    """Smooth images of 28 x 28 pixels: scikit-learn's digits, enlarged, with an empty border."""
    from sklearn.datasets import load_digits

    small = torch.as_tensor(load_digits().images[:40], dtype=torch.float32)[:, None] / 16
    large = torch.nn.functional.interpolate(small, size=20, mode="bilinear", align_corners=False)
    return torch.nn.functional.pad(large, [4] * 4)


def _waves(frequency: float, angle: float) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(float(SIDE)), torch.arange(float(SIDE)), indexing="ij")
    return torch.cos(frequency * (columns * math.cos(angle) + rows * math.sin(angle)))[None, None]


def _orders(coefficients: Tensor, angles: int = ANGLES, scales: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    first = 1 + scales * angles
    return coefficients[:, :1], coefficients[:, 1:first], coefficients[:, first:]


def _direct(image: Tensor, scale: int, place: int) -> Tensor:
    """|x * psi| * phi by sums over pixels, with no Fourier transform of the image and no coarser grid."""
    padded = torch.nn.functional.pad(image, [4] * 4, mode="reflect")[0, 0].double()
    width = padded.shape[-1]
    wave = torch.fft.ifft2(wavelets(width, scale, ANGLES)[place].double())
    smooth = torch.fft.ifft(low_pass(width, 1)).real
    convolved = torch.zeros(width, width, dtype=torch.complex128)
    for row in range(width):
        for column in range(width):
            convolved += padded[row, column] * wave.roll((row, column), (0, 1))
    maps = convolved.abs()
    matrix = torch.stack([smooth.roll(4 + 4 * place) for place in range(SIDE // 4)])
    return matrix @ maps @ matrix.T


def test_81_channels_of_7_by_7(transform: Scattering, digits: Tensor) -> None:
    assert transform(digits).shape == (40, 81, 7, 7)
    assert transform.features(digits).shape == (40, 3969)
    assert Scattering(16, scales=3, angles=4).shape == (1 + 12 + 48, 2, 2)


def test_first_order_is_the_definition_summed_pixel_by_pixel(transform: Scattering, digits: Tensor) -> None:
    gain = float(transform._filters[0][0].max() / wavelets(36, 0, ANGLES).max())
    fine = transform(digits[:1])[0, 1 + 3]
    torch.testing.assert_close(fine.double(), gain * _direct(digits[:1], 0, 3), atol=2e-6, rtol=1e-4)
    # At scale 1 the modulus is averaged on every second pixel: the same up to what aliases.
    coarse, exact = transform(digits[:1])[0, 1 + ANGLES + 5].double(), gain * _direct(digits[:1], 1, 5)
    assert float((coarse - exact).norm() / exact.norm()) < 0.02


def test_wavelets_have_mean_zero_so_a_constant_image_has_order_zero_alone(transform: Scattering) -> None:
    assert float(wavelets(36, 0, ANGLES)[:, 0, 0].abs().max()) < 1e-7
    zeroth, first, second = _orders(transform(torch.full((1, 1, SIDE, SIDE), 0.7)))
    torch.testing.assert_close(zeroth, torch.full_like(zeroth, 0.7), atol=1e-5, rtol=0)
    assert float(first.abs().max()) < 1e-5
    assert float(second.abs().max()) < 1e-5


@pytest.mark.parametrize("place", range(ANGLES))
@pytest.mark.parametrize("scale", [0, 1])
def test_a_grating_answers_in_the_channel_of_its_scale_and_angle(transform: Scattering, scale: int, place: int) -> None:
    """Catches rows and columns exchanged, angles that turn the wrong way, and frequencies off by a factor."""
    image = _waves(FREQUENCY / 2**scale, math.pi * place / ANGLES)
    _, first, _ = _orders(transform(image))
    assert int(first[0, :, 2:5, 2:5].mean((1, 2)).argmax()) == scale * ANGLES + place


def test_energy_falls_with_the_order(transform: Scattering, digits: Tensor) -> None:
    zeroth, first, second = (float(part.square().sum()) for part in _orders(transform(digits)))
    assert zeroth > first > 5 * second > 0


def test_distances_never_grow(transform: Scattering, digits: Tensor) -> None:
    """The sum of powers is at most 1, and touches it; coefficients stand for 2^J x 2^J pixels each."""
    low, high = littlewood_paley(36, 2, ANGLES)
    gain = float(transform._filters[0][0].max() / wavelets(36, 0, ANGLES).max())
    total = low + gain**2 * high
    assert float(total.max()) == pytest.approx(1, abs=1e-6)
    found = transform(digits)
    before = (digits[:20] - digits[20:]).flatten(1).norm(dim=1)
    after = 4 * (found[:20] - found[20:]).flatten(1).norm(dim=1)
    assert bool((after < before).all())


def test_a_shift_of_one_pixel_hardly_moves_the_coefficients_of_a_fine_pattern(
    transform: Scattering, digits: Tensor
) -> None:
    """Digits drawn in fine stripes: their pixels change sign, the modulus forgets the phase."""
    striped = digits * _waves(FREQUENCY, 0)
    moved = striped.roll(1, 3)
    pixels = float((moved - striped).norm() / striped.norm())
    found, found_moved = transform(striped), transform(moved)
    assert float((found_moved - found).norm() / found.norm()) < 0.2 * pixels


def test_a_quarter_turn_of_the_image_turns_the_angles(transform: Scattering, digits: Tensor) -> None:
    """On a grid that a turn maps to itself: an odd number of kept pixels is centred on none, so only means agree."""
    _, first, _ = _orders(transform(digits))
    _, turned, _ = _orders(transform(digits.rot90(1, (2, 3))))
    fine, turned_fine = first[:, :ANGLES].mean((0, 2, 3)), turned[:, :ANGLES].mean((0, 2, 3))
    torch.testing.assert_close(turned_fine, fine.roll(ANGLES // 2), rtol=0.03, atol=0)


def test_every_record_is_transformed_and_normalised_by_itself(transform: Scattering, digits: Tensor) -> None:
    """Catches a normalisation over the batch, which would let one record move another's features."""
    together = transform.features(digits, groups=27, chunk=16)
    changed = digits.clone()
    changed[1:] = digits[1:].flip(0) * 5
    torch.testing.assert_close(together[0], transform.features(changed, groups=27, chunk=7)[0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(40), atol=1e-3, rtol=0)
    by_group = together.unflatten(1, (27, -1)).mean(2)
    assert float(by_group.abs().max()) < 1e-5


@pytest.mark.parametrize("size", [(30, 30), (5, 5), (7, 40), (1, 9), (28, 20)])
def test_any_size_has_coefficients(size: tuple[int, int]) -> None:
    transform = Scattering(size)
    found = transform(torch.full((2, 1, *size), 0.7))
    assert found.shape == (2, 81, -(-size[0] // 4), -(-size[1] // 4))
    torch.testing.assert_close(found[:, 0], torch.full_like(found[:, 0], 0.7), atol=1e-4, rtol=0)


def test_rows_and_columns_are_not_exchanged_where_they_differ_in_number(transform: Scattering, digits: Tensor) -> None:
    """What a wide picture shows on its left is what the square one shows; far from it nothing changes."""
    wide = Scattering((SIDE, 2 * SIDE))(torch.nn.functional.pad(digits, [0, SIDE, 0, 0]))
    torch.testing.assert_close(wide[:, 1:17, :, :5], transform(digits)[:, 1:17, :, :5], atol=0.02, rtol=0.05)


def test_an_empty_image_has_finite_features(transform: Scattering) -> None:
    assert bool(torch.isfinite(transform.features(torch.zeros(1, 1, SIDE, SIDE), groups=27)).all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size=0: must be at least one pixel"),
        ({"size": 28, "scales": 0}, "scales=0: must be at least 1"),
        ({"size": 28, "angles": 0}, "angles=0: must be at least 1"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scattering(**arguments)


def test_images_and_groups_that_do_not_fit_are_refused(transform: Scattering) -> None:
    with pytest.raises(ValueError, match=r"images: shape \(2, 28, 28\); must be \(rows, 1, 28, 28\)"):
        transform(torch.zeros(2, SIDE, SIDE))
    with pytest.raises(ValueError, match="groups=10: must divide the number of channels, 81"):
        transform.features(torch.zeros(1, 1, SIDE, SIDE), groups=10)
