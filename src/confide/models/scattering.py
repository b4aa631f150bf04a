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
    """Scattering coefficients of square images: (rows, 1, side, side) to (rows, channels, side / 2^J, side / 2^J).

    side     pixels, a multiple of 2^scales; images are mirrored at their borders
    scales   J
    angles   L
    """

    def __init__(self, side: int, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        for name, value in (("scales", scales), ("angles", angles)):
            if value < 1:
                raise Refusal(f"{name}={value}: must be at least 1")
        if side % 2**scales or side <= 2**scales:
            raise Refusal(f"side={side}: must be a multiple of 2^scales={2**scales}, and larger than it")
        self.side, self.scales, self.angles = side, scales, angles
        self.margin = 2**scales
        width = side + 2 * self.margin
        # Maps are kept at the coarsest grid that holds them, so every grid has filters of its own.
        self._filters: list[dict[int, Tensor]] = []
        self._averages: list[Tensor] = []
        gain = _gain(width, scales, angles)
        for grid in range(scales):
            at_scale = {scale: gain * wavelets(width >> grid, scale - grid, angles) for scale in range(grid, scales)}
            self._filters.append(at_scale)
            self._averages.append(self._average(width >> grid, grid))

    @property
    def channels(self) -> int:
        pairs = self.scales * (self.scales - 1) // 2
        return 1 + self.scales * self.angles + pairs * self.angles**2

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the coefficients of one image."""
        return self.channels, self.side >> self.scales, self.side >> self.scales

    def _average(self, width: int, grid: int) -> Tensor:
        """Rows that average along one axis with phi and keep every 2^J-th pixel of the image without its margin."""
        response = low_pass(width, self.scales - 1 - grid)
        kernel = torch.fft.ifft(response).real
        centres = self.margin + 2**self.scales * torch.arange(self.side >> self.scales)
        distance = (torch.arange(width)[None] - (centres >> grid)[:, None]) % width
        rows: Tensor = kernel[distance].float()
        return rows

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or images.shape[1:] != (1, self.side, self.side):
            wanted = (1, self.side, self.side)
            raise Refusal(f"images: shape {tuple(images.shape)}; must be (rows, {', '.join(map(str, wanted))})")
        padded = F.pad(images.float(), [self.margin] * 4, mode="reflect")[:, 0]
        found = [self._averaged(padded[:, None], 0)]
        second: list[Tensor] = []
        spectrum = torch.fft.fft2(padded)[:, None]
        for scale in range(self.scales):
            first = self._moduli(spectrum, 0, scale)
            found.append(self._averaged(first, scale))
            if scale + 1 < self.scales:
                spectra = torch.fft.fft2(first)[:, :, None]
                for next_scale in range(scale + 1, self.scales):
                    maps = self._moduli(spectra, scale, next_scale).flatten(1, 2)
                    second.append(self._averaged(maps, next_scale))
        return torch.cat([*found, *second], 1)

    def _moduli(self, spectrum: Tensor, grid: int, scale: int) -> Tensor:
        """|map * psi| at all angles of that scale, on the grid of the scale."""
        filters = self._filters[grid][scale]
        width = spectrum.shape[-1] >> (scale - grid)
        # Keeping one in so many pixels is averaging the spectrum over its aliases. Filters are real.
        parts, total = torch.view_as_real(spectrum), torch.zeros(())
        for row in range(0, spectrum.shape[-2], width):
            for column in range(0, spectrum.shape[-1], width):
                part = parts[..., row : row + width, column : column + width, :].contiguous()
                response = filters[:, row : row + width, column : column + width, None]
                total = part * response if row == column == 0 else total.addcmul_(part, response)
        maps = torch.view_as_real(torch.fft.ifft2(torch.view_as_complex(total)))
        real, imaginary = maps[..., 0], maps[..., 1]
        return torch.addcmul(real * real, imaginary, imaginary).sqrt_().div_(4 ** (scale - grid))

    def _averaged(self, maps: Tensor, grid: int) -> Tensor:
        average = self._averages[grid]
        return average @ maps @ average.T

    @torch.no_grad()
    def features(self, images: Tensor, groups: int | None = None, chunk: int = 64) -> Tensor:
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


def wavelets(width: int, scale: int, angles: int) -> Tensor:
    """Spectra of Morlet wavelets on a grid of width x width pixels, (angles, width, width); real, zero at frequency 0.

    A wave of frequency k under an elliptic Gaussian, less the Gaussian itself so that the mean is zero:
    psi^(w) = g(w - k) - b g(w), b = g(-k) / g(0). The envelope is longer across the wave, by angles / 4, so that the
    angles share the plane.
    """
    rows, columns = _frequencies(width)
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


def _frequencies(width: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the frequency plane and of its periods: (periods, periods, width, width)."""
    periods = torch.arange(-_ALIASES, _ALIASES + 1, dtype=torch.float64)
    axis = 2 * math.pi * (torch.fft.fftfreq(width, dtype=torch.float64) + periods[:, None])
    rows = axis[:, None, :, None].expand(-1, len(periods), -1, width)
    return rows, rows.transpose(0, 1).transpose(2, 3)


def littlewood_paley(width: int, scales: int, angles: int) -> tuple[Tensor, Tensor]:
    """|phi^|^2, and sum |psi^|^2 averaged over a wavelet and its mirror, at every frequency, before scaling."""
    smooth = low_pass(width, scales - 1)
    low = torch.outer(smooth, smooth).square()
    power = torch.stack([wavelets(width, scale, angles).double().square().sum(0) for scale in range(scales)]).sum(0)
    mirrored = power.flip(0, 1).roll((1, 1), (0, 1))
    return low, (power + mirrored) / 2


def _gain(width: int, scales: int, angles: int) -> float:
    """The largest factor of the wavelets that keeps the sum of powers at or below 1."""
    low, high = littlewood_paley(width, scales, angles)
    room = (1 - low).clamp(min=0) / high.clamp(min=1e-12)
    room[0, 0] = math.inf  # where the wavelets vanish
    return math.sqrt(float(room.min()))
