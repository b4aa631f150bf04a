"""SampledGaussian: sampling, clipping bound, noise and cost of one release, in one frozen object.

The mechanism that runs and the event that is charged are read off the same fields, so the accounting cannot disagree
with what ran:

    R = sum over i in B of clip_C(v_i) + z C N(0, I),        B drawn by `sampling` at `rate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from confide.errors import Refusal
from confide.privacy.events import SAMPLINGS, Event, GaussianEvent, NonPrivateEvent, Sampling, above, whole_batch

ClippingStyle: TypeAlias = Literal["flat", "per-layer", "automatic"]
CLIPPING_STYLES: tuple[ClippingStyle, ...] = ("flat", "per-layer", "automatic")


@dataclass(frozen=True)
class SampledGaussian:
    """noise_multiplier  z = noise standard deviation / clip
    clip              C, the largest norm of one record's answer
    rate              probability that a given record is in a batch; for fixed-size batches batch / records, exactly
                      that fraction rounded up
    records           public nominal number of records; the expected batch is rate * records
    private           False permits z = 0 and an infinite clip; such a run is marked as not private everywhere
    secure            noise on a lattice, against attacks on low-order bits; costs time, not epsilon
    """

    noise_multiplier: float
    clip: float
    rate: float
    records: int
    sampling: Sampling = "poisson"
    clipping: ClippingStyle = "flat"
    private: bool = True
    secure: bool = False

    def __post_init__(self) -> None:
        z, clip = self.noise_multiplier, self.clip
        if self.private and not (math.isfinite(z) and z > 0):
            raise Refusal(f"noise_multiplier={z}: must be > 0 (0 only with private=False)")
        if not self.private and z != 0:
            raise Refusal(f"noise_multiplier={z}: must be 0 with private=False, which adds no noise")
        if self.private and not (math.isfinite(clip) and clip > 0):
            raise Refusal(f"clip={clip}: must be a finite number > 0 (infinite only with private=False)")
        if not clip > 0:
            raise Refusal(f"clip={clip}: must be > 0")
        if self.secure and not self.private:
            raise Refusal("secure=True: there is no noise to secure with private=False")
        if not 0 < self.rate <= 1:
            raise Refusal(f"rate={self.rate}: must be in (0, 1]")
        if self.records < 1:
            raise Refusal(f"records={self.records}: must be at least 1")
        if self.sampling not in SAMPLINGS:
            raise Refusal(f"sampling={self.sampling!r}: must be one of {', '.join(SAMPLINGS)}")
        if self.clipping not in CLIPPING_STYLES:
            raise Refusal(f"clipping={self.clipping!r}: must be one of {', '.join(CLIPPING_STYLES)}")
        if self.sampling == "full-batch" and self.rate != 1:
            raise Refusal(f"rate={self.rate}: full-batch sampling uses every record, so the rate must be 1")
        if self.sampling == "fixed-size":
            object.__setattr__(self, "rate", above(whole_batch(self.rate, self.records)))
        if self.sampling == "shuffle" and self.batch < 1:
            raise Refusal(f"rate={self.rate}: gives a batch below one record; raise the rate")

    @property
    def noise_std(self) -> float:
        """z C. A release on a lattice has up to a part in a million more, and says so itself."""
        return self.noise_multiplier * self.clip if self.private else 0.0

    @property
    def expected_batch(self) -> float:
        return float(self.batch) if self.sampling == "fixed-size" else self.rate * self.records

    @property
    def batch(self) -> int:
        """Records in a batch, where that number is fixed."""
        return round(self.rate * self.records)

    @property
    def batches_per_pass(self) -> int:
        """Steps in one pass over a shuffled data set."""
        return math.ceil(self.records / self.batch)

    def event(self, steps: int = 1) -> Event:
        """What `steps` releases cost. A shuffled pass is charged whole, however little of it is used."""
        if not self.private:
            return NonPrivateEvent("run with private=False: no noise was added", steps)
        if self.sampling == "shuffle":
            passes = math.ceil(steps / self.batches_per_pass)
            return GaussianEvent(self.noise_multiplier, "shuffle", self.rate, passes, self.records)
        records = self.records if self.sampling == "fixed-size" else None
        return GaussianEvent(self.noise_multiplier, self.sampling, self.rate, steps, records)
