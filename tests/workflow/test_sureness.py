"""Several classes: a power of the differences of log odds, where one slope cannot be right for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from confide.errors import Refusal
from confide.models.calibrated import Calibrated, stretched
from confide.models.likelihoods import Categorical
from confide.posteriors.draws import Draws
from confide.workflow import recalibrate, sureness

CLASSES, RECORDS = 5, 30_000


def _fit(power: float, noise: float) -> tuple[recalibrate.Recalibration, torch.Tensor, torch.Tensor]:
    """What a release tells of a fit whose log odds have to be stretched, with its logits and the true probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(RECORDS, CLASSES, generator=generator)
    truth = stretched(logits, torch.zeros(CLASSES), power)
    y = torch.multinomial(truth, 1, generator=generator)[:, 0]
    network = torch.nn.Linear(CLASSES, CLASSES, bias=False)
    posterior = Draws(network, Categorical(CLASSES), torch.eye(CLASSES).reshape(1, -1), torch.ones(1))
    rows = recalibrate.odds_of(posterior, 1.0, math.inf).function(logits, y)
    found = rows.sum(0) + noise * torch.randn(rows.shape[1], generator=generator).double()
    return recalibrate.told(found, noise, RECORDS, CLASSES), logits, truth


@pytest.mark.parametrize("power", [0.65, 1.0, 1.6])
def test_a_power_is_found_and_what_it_says_is_right(power: float) -> None:
    """Without it (the broken variant) no slope and floor is: large differences and small ones ask for two slopes."""
    told, logits, truth = _fit(power, 5.0)
    assert told.power == pytest.approx(power, rel=0.15)
    errors = []
    for used in (told.power, 1.0):
        likelihood = Calibrated(CLASSES, told.slope, told.shifts, floor=told.floor, power=used)
        found = likelihood.predictive(logits[None], torch.ones(1)).probabilities
        errors.append(float((found - truth).abs().amax(1).mean()))
    assert errors[0] < 0.02
    if power != 1:
        assert errors[1] > 2 * errors[0]


@pytest.mark.parametrize("spread", [1.0, 2.0, 4.0])
def test_what_lies_between_the_slopes_is_read_off_to_a_thousandth_of_the_records(spread: float) -> None:
    """With many records it decides: an octave apart (the broken variant) they are off by .005 and bend good fits."""
    generator = torch.Generator().manual_seed(4)
    logits = spread * torch.randn(4000, CLASSES, generator=generator).double()
    y, levels = torch.zeros(4000, 1, dtype=torch.long), torch.zeros(CLASSES).double()
    law: Any = lambda slope, power=1.0: stretched(slope * logits, levels, power)  # noqa: E731
    rows = sureness.told_by(law, y, levels)[:, : 3 * sureness.TOLD].reshape(4000, 3, -1).mean(0)
    rows = rows / sureness.weights()[0] / torch.tensor(sureness.FLOOR_WEIGHTS)[:, None]
    usual = law(sureness.SURENESS[sureness.USUAL]).amax(1, keepdim=True)
    shares = torch.cat(sureness._sure_shares(usual), 1)
    for slope in (0.65, 0.75, 0.95, 1.0, 1.1, 1.4, 2.0):
        parts = sureness._pieces(torch.tensor([math.log(slope)], dtype=torch.float64), even=True)[0]
        read = rows[:, 1 : len(sureness.SURENESS)] @ parts
        exact = (shares * (law(slope).amax(1, keepdim=True) - usual)).mean(0)
        assert float((read - exact).abs().max()) < 1e-3


@pytest.mark.parametrize("spread", [0.7, 1.5, 3.0])
def test_slopes_near_zero_are_read_off_what_is_known_of_zero(spread: float) -> None:
    """A fit of which next to nothing is true has to be flattened nearly whole. Without what is known of a slope of zero
    (the broken variant) sureness stays where it is from half an octave under the first slope that is told on: up to
    .27 too sure here."""
    generator = torch.Generator().manual_seed(6)
    logits = spread * torch.randn(RECORDS, CLASSES, generator=generator)
    y = torch.multinomial((0.1 * logits).softmax(1), 1, generator=generator)[:, 0]
    network = torch.nn.Linear(CLASSES, CLASSES, bias=False)
    posterior = Draws(network, Categorical(CLASSES), torch.eye(CLASSES).reshape(1, -1), torch.ones(1))
    found = recalibrate.odds_of(posterior, 1.0, math.inf).function(logits, y).sum(0)
    told = recalibrate.told(found, 5.0, RECORDS, CLASSES)
    likelihood = Calibrated(CLASSES, told.slope, told.shifts, floor=told.floor, power=told.power)
    stated = likelihood.predictive(logits[None], torch.ones(1)).probabilities.amax(1)
    assert told.slope < 0.2
    assert float(stated.mean()) == pytest.approx(float((0.1 * logits).softmax(1).amax(1).mean()), abs=0.015)


def test_noise_alone_stretches_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    size, powers = sureness.size(CLASSES), []
    for _ in range(8):
        powers.append(recalibrate.told(1e3 * torch.randn(size, generator=generator).double(), 1e3, 300, CLASSES).power)
    assert max(abs(math.log(power)) for power in powers) < 0.1


def test_no_record_tells_more_than_the_norm_that_its_noise_is_for() -> None:
    """Sums beyond it would be clipped, and estimates be off: what powers add has to fit in."""
    generator = torch.Generator().manual_seed(2)
    for scale in (0.1, 1.0, 3.0, 10.0):
        logits = scale * torch.randn(2000, CLASSES, generator=generator)
        y = torch.randint(CLASSES, (2000,), generator=generator)
        network = torch.nn.Linear(CLASSES, CLASSES, bias=False)
        posterior = Draws(network, Categorical(CLASSES), torch.eye(CLASSES).reshape(1, -1), torch.ones(1))
        rows = recalibrate.odds_of(posterior, 1.0, math.inf).function(logits, y)
        assert float((rows.norm(dim=1) > 1.02).double().mean()) < 0.03


def test_levels_stay_where_nothing_was_learnt() -> None:
    """Without levels (the broken variant) a power would move the shares of classes of which nothing else is known."""
    shares = torch.tensor([0.6, 0.3, 0.1])
    outputs = shares.log().expand(1, 4, 3)
    levels = tuple(shares.log().tolist())
    kept = Calibrated(3, 1.0, (0.0, 0.0, 0.0), power=1.7, levels=levels).predictive(outputs, torch.ones(1))
    torch.testing.assert_close(kept.probabilities[0], shares, atol=1e-5, rtol=0)
    lost = Calibrated(3, 1.0, (0.0, 0.0, 0.0), power=1.7).predictive(outputs, torch.ones(1))
    assert float((lost.probabilities[0] - shares).abs().max()) > 0.05


@pytest.mark.parametrize("power", [0.5, 0.8, 1.0, 1.3, 1.8])
def test_a_stretch_moves_the_likeliest_class_alone_and_leaves_it_the_likeliest(power: float) -> None:
    """Three classes that are nearly alike: a power takes so much off the first that the second would pass it."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.cat([torch.tensor([[2.0, 1.99, 1.0, -3.0]]), 4 * torch.randn(500, 4, generator=generator)])
    plain, found = logits.softmax(1), stretched(logits, torch.zeros(4), power)
    torch.testing.assert_close(found.sum(1), torch.ones(501))
    best = plain.argmax(1, keepdim=True)
    torch.testing.assert_close(found.gather(1, best)[:, 0], found.amax(1))
    left, before = (value.scatter(1, best, 0.0) for value in (found, plain))
    shares, wanted = (value / value.sum(1, keepdim=True) for value in (left, before))
    torch.testing.assert_close(shares, wanted, atol=1e-4, rtol=1e-3)
    sure, unsure = plain.amax(1) > 0.97, plain.amax(1) < 0.6
    more = (found - plain).gather(1, best)[:, 0]
    if power != 1:
        assert float((more * (1 if power > 1 else -1))[sure].mean()) > 0
        assert float((more * (1 if power > 1 else -1))[unsure].mean()) < 0


def test_a_loss_under_a_power_is_that_of_its_probabilities_and_has_a_gradient() -> None:
    logits = torch.tensor([[2.0, -1.0, -7.0, 1.5], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    likelihood = Calibrated(4, 1.2, (0.0,) * 4, power=0.5)
    y = torch.tensor([3, 1])
    loss = likelihood.loss(logits, y)
    found = likelihood.predictive(logits[None], torch.ones(1)).probabilities
    torch.testing.assert_close(loss, -found.gather(1, y[:, None])[:, 0].log())
    loss.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("wrong", [{"power": 0.0}, {"power": math.inf}, {"power": 1.2, "levels": (0.0,)}])
def test_what_is_no_power_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(Refusal):
        Calibrated(3, 1.0, (0.0,) * 3, **wrong)  # type: ignore[arg-type]
    with pytest.raises(Refusal):
        Calibrated(2, 1.0, (0.0, 0.0), power=1.2)
