"""A belief of what scouts were told holds what it should, and says when nothing explains that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, Poisson

import confide
from confide.layers.programs import ScoutedProgram
from confide.mechanism.clipping import clipped_sum
from confide.methods import _told
from confide.methods._heard import Heard, heard_draws, most_in_their_midst
from confide.models.program_sharpness import outcomes_of
from confide.models.programs import Program, ProgramLikelihood
from tests.methods.test_scouts import led

RECORDS, NOISE, VECTORS = 2000, 0.03, 32
FORM = torch.zeros(160, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), None


def hill() -> Program:
    """The middle of a law as wide as one."""
    return confide.models.program(
        lambda p, x, y: Normal(p["middle"], 1.0).log_prob(y), {"middle": Normal(0.0, 3.0)}
    ).double()


def problem_of(program: Program, seed: int) -> Any:
    return SimpleNamespace(
        module=program,
        likelihood=ProgramLikelihood(form=FORM),
        generator=torch.Generator().manual_seed(seed),
        records=RECORDS,
        plan=SimpleNamespace(expected_batch=RECORDS / 10),
    )


def told(program: Program, truth: float, seed: int) -> tuple[Heard, ...]:
    """Two generations of one question each, as a boundary would answer it: batches and noise are drawn."""
    generator = torch.Generator().manual_seed(seed)
    y = truth + torch.randn(RECORDS, generator=generator, dtype=torch.float64)
    found = []
    for width in (3.0, 1.0):
        asked = ScoutedProgram(program, VECTORS)
        asked.vectors.copy_(width * torch.randn(VECTORS, 1, generator=generator, dtype=torch.float64))
        drawn = y[torch.rand(RECORDS, generator=generator) < 0.1]
        total = torch.zeros(VECTORS, dtype=torch.float64)
        clipped_sum(asked, ProgramLikelihood().loss, drawn[:, None], drawn, clip=1e6, out=total)
        noise = NOISE * torch.randn(VECTORS, generator=generator, dtype=torch.float64)
        found.append(Heard(asked.vectors.clone(), total / (RECORDS / 10) + noise, NOISE**2, 1))
    return tuple(found)


def deviations(repeats: int) -> tuple[Tensor, Tensor]:
    """Of truths from the prior, in those of beliefs about them; and widths."""
    off, wide = [], []
    for seed in range(repeats):
        program = hill()
        truth = 3 * float(torch.randn((), generator=torch.Generator().manual_seed(1000 + seed)))
        draws = heard_draws(problem_of(program, seed), told(program, truth, seed))
        assert draws is not None
        off.append((truth - draws.mean()) / draws.std())
        wide.append(draws.std())
    return torch.stack(off), torch.stack(wide)


@pytest.mark.parametrize("repeats", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_truths_are_as_far_off_as_the_belief_says(repeats: int) -> None:
    off, wide = deviations(repeats)
    by_chance = 4 * (2 / repeats) ** 0.5  # four deviations of a mean of squares
    assert 1 - by_chance < float(off.square().mean()) < 1 + by_chance
    assert float(wide.median()) < 0.1, "the prior is thirty times as wide"


def test_noise_that_is_taken_for_less_than_it_is_explains_nothing() -> None:
    """So the check can fail: with a hundredth of the noise nothing fits, or truths are many deviations away."""
    program = hill()
    heard = told(program, 1.0, 3)
    shouted = tuple(Heard(one.vectors, one.losses, one.noise / 1e4, 1) for one in heard)
    assert heard_draws(problem_of(program, 0), heard) is not None
    assert heard_draws(problem_of(program, 0), shouted) is None
    assert heard_draws(problem_of(program, 0), ()) is None


def test_releases_that_no_vector_explains_give_no_belief() -> None:
    program = hill()
    first, second = told(program, 1.0, 3)
    upside_down = Heard(second.vectors, -second.losses, second.noise, 1)
    assert heard_draws(problem_of(program, 0), (first, upside_down)) is None


def test_a_wide_law_of_numbers_is_not_taken_for_one_of_counts() -> None:
    """At a vector far above zero it adds up over whole numbers too; at most vectors of the prior it does not."""
    program = hill()
    found = outcomes_of(program, torch.tensor([[30.0], [0.3], [-4.0], [1.0]], dtype=torch.float64), FORM)
    assert found is not None
    assert float(found.values.min()) < -10
    counts = confide.models.program(
        lambda p, x, y: Poisson(p["rate"].exp()).log_prob(y), {"rate": Normal(0.0, 1.0)}
    ).double()
    found = outcomes_of(counts, torch.tensor([[0.0], [1.0], [-1.0]], dtype=torch.float64), FORM)
    assert found is not None
    assert found.values[:3].tolist() == [0.0, 1.0, 2.0]


def test_the_midst_of_two_peaks_is_in_one_of_them() -> None:
    noise = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = noise + torch.where(torch.arange(200) % 3 == 0, -20.0, 20.0)[:, None]
    assert float(most_in_their_midst(draws).abs().min()) > 15


def test_a_chain_that_did_not_arrive_gives_what_scouts_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_told, "LARGEST_WAY", 0.0)
    found = led(monkeypatch, True)
    assert found.facts["draws_of"].startswith("what scouts were told")
    assert "less than a peak would" in found.facts["warning"]
    for name, truth in (("low", 1.0), ("gap", 4.0)):
        draws = found.named_draws()[name]
        assert abs(float(draws.mean()) - truth) < 4 * float(draws.std()) < 3
