"""The clip that follows a quantile: where it settles, what it costs, and that it sees releases only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import confide
from confide import methods
from confide.mechanism.gaussian import SampledGaussian
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import GaussianEvent
from confide.sources.adaptive_clip import AdaptiveClip, norms_of, scaled, under
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, StatisticQuery
from confide.sources.replay import Recorder, Replay

RECORDS = 2000


def rows(x: Tensor, y: Tensor) -> Tensor:
    return x.double()


def lengths(seed: int = 0) -> Tensor:
    """One number per record, log-normal around 5."""
    return 5 * torch.exp(torch.randn(RECORDS, 1, generator=torch.Generator().manual_seed(seed)))


def private(**options: Any) -> PrivateData:
    return PrivateData(
        lengths(), torch.zeros(RECORDS), schema=confide.Schema(records=RECORDS), **{"seed": 1, **options}
    )


def mechanism(clip: float = 0.1) -> SampledGaussian:
    return SampledGaussian(1.0, clip, 0.25, RECORDS)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_it_settles_at_the_quantile(quantile: float) -> None:
    source = AdaptiveClip(private(), quantile=quantile)
    for _ in range(120):
        source.answer(StatisticQuery(rows, 1), mechanism())
    share = (lengths() <= 0.1 * source.factor).double().mean()
    assert share == pytest.approx(quantile, abs=0.08)


def test_releases_are_those_of_the_present_clip() -> None:
    """Noise off: scaling before and after is the same as clipping at C; the noise is z C."""
    source = AdaptiveClip(private(), learning_rate=0.5)
    silent = SampledGaussian(0.0, 0.1, 1.0, RECORDS, "full-batch", private=False)
    for _ in range(6):
        clip = 0.1 * source.factor
        found = source.answer(StatisticQuery(rows, 1), silent).sum.item()
        assert found == pytest.approx(lengths().clamp(max=clip).sum().item(), rel=1e-5)
    release = source.answer(StatisticQuery(rows, 1), mechanism())
    assert release.noise_std < 0.1 * source.factor * 2
    assert release.noise_std > 0.1


def test_counting_is_paid_before_the_first_record_and_stated() -> None:
    ledger = confide.Ledger()
    source = AdaptiveClip(private(ledger=ledger, name="d", seed=None), count_noise=8.0)
    module = confide.networks.linear(1)
    plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=500, steps=10)
    run = confide.fit(methods.SGD(), module, source, plan, seed=0)
    charged = {event.noise_multiplier: event.count for event in ledger.events("d")}
    assert charged == {2.0: 10, 8.0: 10}
    assert {event.noise_multiplier: event.count for event in run.privacy.events} == charged
    assert run.privacy.epsilon() == pytest.approx(sound_epsilon(ledger.events("d"), 1e-5))
    assert run.privacy.epsilon() > sound_epsilon(plan.events(), 1e-5)


def test_counts_of_several_chains_are_stated_once_each() -> None:
    """A statement from the plan alone would leave the counts out; one from all counts would state some twice."""
    ledger = confide.Ledger()
    source = AdaptiveClip(private(ledger=ledger, name="d", seed=None), count_noise=8.0)
    plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=500, steps=10, chains=2)
    run = confide.fit_chains(methods.SGLD(), confide.networks.linear(1), source, plan, chains=2, seed=0)
    stated = {event.noise_multiplier: event.count for event in run.privacy.events}
    assert stated == {event.noise_multiplier: event.count for event in ledger.events("d")} == {2.0: 20, 8.0: 20}


def test_a_budget_for_the_releases_alone_pays_nothing() -> None:
    """Releases and counts are one charge: half of it would be money spent on a run that cannot go on."""
    ledger = confide.Ledger()
    plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=500, steps=10)
    ledger.limit(sound_epsilon(plan.events(), 1e-5) * 1.01, 1e-5)
    source = AdaptiveClip(private(ledger=ledger, name="d", seed=None), count_noise=2.0)
    with pytest.raises(confide.BudgetExceeded):
        confide.fit(methods.SGD(), confide.networks.linear(1), source, plan)
    assert ledger.events("d") == ()


def test_the_clip_is_a_function_of_releases() -> None:
    """Replayed with the data absent, the run is bit-identical: counts that were read without noise would show."""
    module = confide.networks.linear(1)
    plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=500, steps=10)
    recorder = Recorder(private())
    first = confide.fit(methods.SGD(), module, AdaptiveClip(recorder), plan, seed=0)
    replay = Replay(recorder.releases, confide.Schema(records=RECORDS))
    again = confide.fit(methods.SGD(), module, AdaptiveClip(replay), plan, seed=0)
    assert torch.equal(first.posterior.draws, again.posterior.draws)  # type: ignore[attr-defined]


def test_one_record_moves_a_count_by_a_half_whatever_it_holds() -> None:
    module = confide.networks.linear(3)
    query = GradientQuery(module, confide.likelihoods.Gaussian(1.0).loss)
    counts = AdaptiveClip(private()).counting(SampledGaussian(0.0, 1.0, 1.0, 6, "full-batch", private=False))
    others = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for record in ([1e30, 1.0, 1.0], [0.0, 0.0, 0.0], [float("nan")] * 3, [1e-40, 0.0, 0.0]):
        sums = []
        for x in (torch.cat([others, torch.tensor([record])]), others):
            data = PrivateData(x, torch.ones(len(x)), schema=confide.Schema(records=6), seed=1)
            sums.append(data.answer(under(query, 0.5), counts).sum.item())
        assert abs(sums[0] - sums[1]) <= 0.5 + 1e-9


def test_scaling_and_norms_of_gradients() -> None:
    module = confide.networks.linear(3)
    query = GradientQuery(module, confide.likelihoods.Gaussian(1.0).loss)
    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.ones(4)
    expected = torch.cat([x, torch.ones(4, 1)], 1).norm(dim=1)  # gradient (output - y) (x, 1) at zero weights
    assert torch.allclose(norms_of(query, x, y), expected, rtol=1e-5)
    assert torch.allclose(norms_of(scaled(query, 3.0), x, y), 3 * expected, rtol=1e-5)


def test_checkpoints_are_refused(tmp_path: Any) -> None:
    """The clip is not part of the method's state, so a resumed run would have another law."""
    module = confide.networks.linear(1)
    plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=500, steps=4)
    with pytest.raises(ValueError, match="checkpoint"):
        confide.fit(methods.SGD(), module, AdaptiveClip(private()), plan, checkpoint=tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"quantile": 1.0}, r"quantile=1.0: must be in \(0, 1\)"), ({"learning_rate": 0.0}, "learning_rate=0.0: must be")],
)
def test_refusals(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveClip(private(), **options)  # type: ignore[arg-type]


class TestTarget:
    """What is counted beside a plan is inside its target: 1 became 1.002, with count_noise=3 1.41."""

    def run(self, plan: confide.Plan, chains: int = 1, **options: Any) -> confide.Run:
        source = AdaptiveClip(private(seed=None), **options)
        if chains > 1:
            return confide.fit_chains(methods.SGLD(), confide.networks.linear(1), source, plan, chains=chains)
        return confide.fit(methods.SGD(), confide.networks.linear(1), source, plan)

    @pytest.mark.parametrize("count_noise", [None, 3.0])
    def test_a_target_is_kept(self, count_noise: float | None) -> None:
        plan = confide.plan(epsilon=1.0, delta=1e-5, records=RECORDS, batch=200, steps=10)
        run = self.run(plan, count_noise=count_noise)
        assert 0.99 < run.privacy.epsilon() <= 1.0
        assert run.plan.mechanism.noise_multiplier > plan.mechanism.noise_multiplier
        without = (*plan.events(), *run.privacy.events[1:])
        assert sound_epsilon(without, 1e-5) > 1.0, "the plan's own noise would not have kept it"
        assert self.run(run.plan, count_noise=count_noise).plan == run.plan, "done once, it stays"

    def test_of_all_chains_and_with_what_was_spent_before(self) -> None:
        count = GaussianEvent(4.0)
        settings: dict[str, Any] = {"delta": 1e-5, "records": RECORDS, "batch": 200, "steps": 10}
        plan = confide.plan(epsilon=1.0, chains=2, spent=[count], **settings)
        run = self.run(plan, chains=2, count_noise=5.0)
        assert 0.98 < sound_epsilon((count, *run.privacy.events), 1e-5) <= 1.0

    def test_counts_that_cost_more_than_the_target_are_refused_before_the_charge(self) -> None:
        plan = confide.plan(epsilon=0.1, delta=1e-5, records=RECORDS, batch=200, steps=10)
        data = private(seed=None)
        with pytest.raises(ValueError, match=r"epsilon=0.1: the releases that share it with this run"):
            confide.fit(methods.SGD(), confide.networks.linear(1), AdaptiveClip(data, count_noise=0.5), plan)
        assert not data.ledger.entries()

    def test_noise_that_was_given_stays(self) -> None:
        plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=200, steps=10)
        assert self.run(plan).plan == plan
