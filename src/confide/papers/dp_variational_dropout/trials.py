"""The same trials for every method of Table 1, at every epsilon: rate and clip, on images that are assumed public."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from confide.papers import protocol
from confide.papers.base import Context
from confide.papers.dp_variational_dropout.fits import DropoutSetting, trial
from confide.papers.sets import Set

RATES, CLIPS = (1.0, 0.5, 2.0), (1.0, 0.5)
"""Times those of the middle."""
PUBLIC_RECORDS = 10_000


def settled(
    name: str, data: Set, middles: Mapping[tuple[str, float], DropoutSetting], context: Context
) -> protocol.Protocol:
    """`middles`: by method and epsilon, the setting that its trials lie around."""
    _, public = protocol.parted(data, min(PUBLIC_RECORDS, data.records // 2))
    wanted = {(method, f"{epsilon:g}"): (method, epsilon, one) for (method, epsilon), one in middles.items()}

    def score(key: tuple[str, ...], candidate: protocol.Candidate) -> float:
        method, epsilon, middle = wanted[key[0], key[1]]
        setting = replace(middle, **candidate)
        what = ("dp-variational-dropout", name, "trial", method, setting, epsilon)
        return context.part(float, what, lambda: trial(public, data, method, setting, epsilon, context))

    about = (
        f"{len(public.y_test)} of the last {public.records + len(public.y_test)} training records, which are assumed "
        f"public and train later; the trials learn from the other {public.records} under the noise of the real run"
    )
    offered: dict[tuple[str, ...], list[protocol.Candidate]] = {
        key: [{"rate": rate * one.rate, "clip": clip * one.clip} for rate in RATES for clip in CLIPS]
        for key, (_, _, one) in wanted.items()
    }
    before: dict[tuple[str, ...], str] = {key: _before(one) for key, (_, _, one) in wanted.items()}
    return protocol.settle(offered, score, about=about, score="log loss", context=context, before=before)


def _before(middle: DropoutSetting) -> str:
    """What trials of variational dropout alone had found, on the same images, and all methods have."""
    around = f"middle of rate {middle.rate:g} and clip {middle.clip:g}"
    return f"by trials of variational dropout: batch {middle.batch}, {middle.epochs:g} passes, {around}"
