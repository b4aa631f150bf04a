"""The wavelet scattering transform: image features that no data were used for.

A fixed function of one image at a time (Mallat, Comm. Pure Appl. Math. 2012; Bruna and Mallat, IEEE TPAMI 2013), so it
may be applied to private records at no cost. With Morlet wavelets psi at scales 2^j, j < J, and angles pi l / L, and a
Gaussian low-pass phi at scale 2^J,

    order 0   x * phi
    order 1   |x * psi_(j1,l1)| * phi
    order 2   ||x * psi_(j1,l1)| * psi_(j2,l2)| * phi,    j1 < j2

each kept at every 2^J-th pixel: 1 + J L + L^2 J (J - 1) / 2 channels, 81 for J = 2 and L = 8.

The modulus removes the phase, so small shifts hardly matter; the second order returns what the average of the first
one lost. Wavelets are scaled by one constant such that |phi^|^2 + sum |psi^|^2, taken over a filter and its mirror, is
at most 1 at every frequency: then no two images are further apart after the transform than before.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.errors import Refusal

BANDWIDTH = 0.8
"""Deviation of the envelope at scale 1, in pixels."""
FREQUENCY = 3 * math.pi / 4
"""Of the wave at scale 1, in radians per pixel."""
SMALLEST_VARIANCE = 1e-10
"""Of a group of coefficients that is still normalised to 1: that of an empty image is rounding."""
_ALIASES = 2
"""A filter sampled on pixels has the spectrum of the continuous one, summed over this many periods to either side."""


class Scattering(nn.Module):
    """Scattering coefficients of images: (rows, 1, height, width) to (rows, channels, height / 2^J, width / 2^J).

    size     pixels: a side, or (height, width). Images are mirrored at their borders, also up to the next multiple of
             2^J, so that any size has coefficients
    scales   J
    angles   L
    """

    def __init__(self, size: int | tuple[int, int], scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        for name, value in (("scales", scales), ("angles", angles)):
            if value < 1:
                raise Refusal(f"{name}={value}: must be at least 1")
        self.size = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        if min(self.size) < 1:
            raise Refusal(f"size={size}: must be at least one pixel high and wide")
        self.scales, self.angles = scales, angles
        self.margin = 2**scales
        self.places = tuple(-(-length // 2**scales) for length in self.size)
        grid = tuple(2**scales * count + 2 * self.margin for count in self.places)
        self._mirrored = [_mirrored(length, wide, self.margin) for length, wide in zip(self.size, grid, strict=True)]
        # Maps are kept at the coarsest grid that holds them, so every grid has filters of its own.
        self._filters: list[dict[int, Tensor]] = []
        self._averages: list[tuple[Tensor, Tensor]] = []
        gain = _gain(grid, scales, angles)
        for level in range(scales):
            height, width = grid[0] >> level, grid[1] >> level
            self._filters.append(
                {scale: gain * wavelets(width, scale - level, angles, height) for scale in range(level, scales)}
            )
            self._averages.append((self._average(height, level, 0), self._average(width, level, 1)))
        self._blocks = [
            {scale: _blocks(filters, scale - level) for scale, filters in at.items()}
            for level, at in enumerate(self._filters)
        ]

    @property
    def channels(self) -> int:
        pairs = self.scales * (self.scales - 1) // 2
        return 1 + self.scales * self.angles + pairs * self.angles**2

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the coefficients of one image."""
        return self.channels, self.places[0], self.places[1]

    def _average(self, width: int, level: int, axis: int) -> Tensor:
        """Rows that average along one axis with phi and keep every 2^J-th pixel of the image without its margin."""
        response = low_pass(width, self.scales - 1 - level)
        kernel = torch.fft.ifft(response).real
        centres = self.margin + 2**self.scales * torch.arange(self.places[axis])
        distance = (torch.arange(width)[None] - (centres >> level)[:, None]) % width
        rows: Tensor = kernel[distance].float()
        return rows

    @torch.no_grad()
    def forward(self, images: Tensor, orders: int = 2) -> Tensor:
        """orders   up to which coefficients are computed: 1 or 2"""
        if images.ndim != 4 or images.shape[1:] != (1, *self.size):
            wanted = (1, *self.size)
            raise Refusal(f"images: shape {tuple(images.shape)}; must be (rows, {', '.join(map(str, wanted))})")
        padded = images[:, 0].float().index_select(1, self._mirrored[0]).index_select(2, self._mirrored[1])
        found = [self._averaged(padded[:, None], 0)]
        second: list[Tensor] = []
        spectrum = torch.fft.fft2(padded)[:, None]
        for scale in range(self.scales):
            first = self._moduli(spectrum, 0, scale)
            found.append(self._averaged(first, scale))
            if scale + 1 < self.scales and orders > 1:
                spectra = torch.fft.fft2(first)
                for next_scale in range(scale + 1, self.scales):
                    second.append(self._averaged(self._moduli(spectra, scale, next_scale), next_scale))
        return torch.cat([*found, *second], 1)

    def _moduli(self, spectra: Tensor, level: int, scale: int) -> Tensor:
        """|map * psi| of every map at all angles of that scale, on the grid of the scale."""
        down = scale - level
        rows, maps = spectra.shape[:2]
        height, width = spectra.shape[-2] >> down, spectra.shape[-1] >> down
        # Keeping one in so many pixels is averaging the spectrum over its aliases.
        total: Tensor | None = None
        for (row, column), response in self._blocks[level][scale].items():
            part = spectra[..., row : row + height, column : column + width].contiguous()
            numbers = torch.view_as_real(part).reshape(rows * maps, 1, -1)
            total = numbers * response if total is None else total.addcmul_(numbers, response)
        assert total is not None  # a map has one block at least
        folded = torch.view_as_complex(total.view(rows, maps * self.angles, height, width, 2))
        parts = torch.view_as_real(torch.fft.ifft2(folded))
        squares = parts * parts
        return torch.add(squares[..., 0], squares[..., 1]).sqrt_().div_(4**down)

    def _averaged(self, maps: Tensor, level: int) -> Tensor:
        down, across = self._averages[level]
        return down @ maps @ across.T

    @torch.no_grad()
    def features(self, images: Tensor, groups: int | None = None, chunk: int = 32) -> Tensor:
        """Flat coefficients, (rows, channels * places), in chunks that stay in the processor's cache.

        groups   normalise every record by itself: each of so many groups of channels to mean 0 and variance 1 over its
                 coefficients (Wu and He, ECCV 2018), and all of them together to a vector of length 1
        """
        if groups is not None and self.channels % groups:
            raise Refusal(f"groups={groups}: must divide the number of channels, {self.channels}")
        out = torch.empty(len(images), math.prod(self.shape))
        for start in range(0, len(images), chunk):
            part = self(images[start : start + chunk])
            if groups is not None:
                part = F.group_norm(part, groups, eps=SMALLEST_VARIANCE) / math.sqrt(math.prod(self.shape))
            out[start : start + chunk] = part.flatten(1)
        return out


def _blocks(filters: Tensor, down: int) -> dict[tuple[int, int], Tensor]:
    """Filters by the blocks of the plane that fall on each other on a grid coarser by 2^down.

    They are real: each number is laid out twice, for the real and the imaginary part of what it multiplies.
    """
    height, width = filters.shape[1] >> down, filters.shape[2] >> down
    return {
        (row, column): filters[:, row : row + height, column : column + width].flatten(1).repeat_interleave(2, 1)
        for row in range(0, filters.shape[1], height)
        for column in range(0, filters.shape[2], width)
    }


def _mirrored(length: int, wide: int, margin: int) -> Tensor:
    """Which pixel of an axis stands at each place of its grid: mirrored at both ends, as often as the grid asks for."""
    places = torch.arange(wide) - margin
    period = max(1, 2 * (length - 1))
    folded = places % period
    return torch.where(folded < length, folded, period - folded)


def wavelets(width: int, scale: int, angles: int, height: int | None = None) -> Tensor:
    """Spectra of Morlet wavelets on a grid of pixels, (angles, height, width); real, zero at frequency 0.

    A wave of frequency k under an elliptic Gaussian, less the Gaussian itself so that the mean is zero:
    psi^(w) = g(w - k) - b g(w), b = g(-k) / g(0). The envelope is longer across the wave, by angles / 4, so that the
    angles share the plane.
    """
    rows, columns = _frequencies(width if height is None else height, width)
    waves = []
    for place in range(angles):
        cosine, sine = math.cos(math.pi * place / angles), math.sin(math.pi * place / angles)
        along, across = columns * cosine + rows * sine, rows * cosine - columns * sine
        across = across * max(1.0, angles / 4)
        wave = _envelope(along - FREQUENCY / 2**scale, across, scale)
        centre = _envelope(along, across, scale)
        waves.append(wave - wave[0, 0] / centre[0, 0] * centre)
    return torch.stack(waves).float()


def _envelope(along: Tensor, across: Tensor, scale: int) -> Tensor:
    """A Gaussian's spectrum, summed over the periods of the grid."""
    variance = (BANDWIDTH * 2.0**scale) ** 2
    return torch.exp(-0.5 * variance * (along.square() + across.square())).sum((0, 1))


def low_pass(width: int, scale: int) -> Tensor:
    """Spectrum of a Gaussian along one axis, 1 at frequency 0; the plane's is the product of two."""
    periods = torch.arange(-_ALIASES, _ALIASES + 1, dtype=torch.float64)[:, None]
    frequencies = 2 * math.pi * (torch.fft.fftfreq(width, dtype=torch.float64) + periods)
    response = torch.exp(-0.5 * (BANDWIDTH * 2.0**scale * frequencies).square()).sum(0)
    return response / response[0]


def _frequencies(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the frequency plane and of its periods: (periods, periods, height, width)."""
    periods = torch.arange(-_ALIASES, _ALIASES + 1, dtype=torch.float64)
    down, across = (
        2 * math.pi * (torch.fft.fftfreq(length, dtype=torch.float64) + periods[:, None]) for length in (height, width)
    )
    rows = down[:, None, :, None].expand(-1, len(periods), -1, width)
    return rows, across[None, :, None, :].expand(len(periods), -1, height, -1)


def littlewood_paley(width: int, scales: int, angles: int, height: int | None = None) -> tuple[Tensor, Tensor]:
    """|phi^|^2, and sum |psi^|^2 averaged over a wavelet and its mirror, at every frequency, before scaling."""
    height = width if height is None else height
    low = torch.outer(low_pass(height, scales - 1), low_pass(width, scales - 1)).square()
    powers = [wavelets(width, scale, angles, height).double().square().sum(0) for scale in range(scales)]
    power = torch.stack(powers).sum(0)
    mirrored = power.flip(0, 1).roll((1, 1), (0, 1))
    return low, (power + mirrored) / 2


def _gain(grid: tuple[int, ...], scales: int, angles: int) -> float:
    """The largest factor of the wavelets that keeps the sum of powers at or below 1."""
    low, high = littlewood_paley(grid[1], scales, angles, grid[0])
    room = (1 - low).clamp(min=0) / high.clamp(min=1e-12)
    room[0, 0] = math.inf  # where the wavelets vanish
    return math.sqrt(float(room.min()))
