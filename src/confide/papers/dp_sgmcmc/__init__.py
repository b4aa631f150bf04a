"""Li, Chen, Liu and Carin (2019): step sizes whose own noise is private, Adult against epsilon, MNIST."""

from __future__ import annotations

from functools import partial
from typing import Any

from confide.papers.base import (
    COLOURS,
    MARKERS,
    Cell,
    Context,
    Experiment,
    Figure,
    Paper,
    PaperOutcome,
    PaperTable,
)
from confide.papers.dp_sgmcmc import adult, digits, gan_table, teachers
from confide.papers.dp_sgmcmc.claims import CLAIMS

RECORDS, STEPS, BATCH, DELTA = 50_000, 10_000, 128, 1e-5
PAPER_EPSILON, PAPER_FIRST_STEP, PAPER_WANG = 0.1, 0.103, 1.54e-6


def run_step_sizes(context: Context) -> PaperOutcome:
    """Figures 1 and 2, the sentence with the 0.103, and the same for the other two samplers."""
    epsilons = (0.1,) if context.quick else (0.02, 0.1, 0.5, 1.0, 1.7)
    steps = 500 if context.quick else STEPS
    sizes: dict[tuple[str, float], float] = {}
    rows: list[tuple[Cell, ...]] = []
    for done, epsilon in enumerate(epsilons):
        fixed, falling = (_largest(epsilon, steps, schedule) for schedule in ("fixed", "decreasing"))
        sizes.update({("fixed", epsilon): fixed.step_size, ("decreasing", epsilon): falling.step_size})
        sizes["wang", epsilon] = fixed.wang2015
        quoted = epsilon == PAPER_EPSILON
        rows += [
            ("fixed", epsilon, None, fixed.step_size, fixed.epsilon),
            ("first of t^(-1/3)", epsilon, PAPER_FIRST_STEP if quoted else None, falling.step_size, falling.epsilon),
            (
                "Wang et al. (2015)",
                epsilon,
                PAPER_WANG if quoted else None,
                fixed.wang2015,
                _cost(fixed.wang2015, steps),
            ),
        ]
        context.progress("step sizes", done + 1, len(epsilons) + 1)
    rows.append(("the paper's first step", PAPER_EPSILON, PAPER_FIRST_STEP, PAPER_FIRST_STEP, _paper_cost(steps)))
    table = PaperTable(
        f"Largest step size: N = {RECORDS}, T = {steps}, L = 1, delta {DELTA:g}, batches of {BATCH}",
        ("step size", "epsilon asked for", "paper", "ours", "sound epsilon"),
        tuple(rows),
        (
            "Step sizes as the paper writes them: w' = w - eta (mean clipped gradient + prior / N) + N(0, eta / N).",
            "The paper's 0.103 costs more than the 0.1 that it is said to: its constant does not follow from its own "
            "inequality, and its lemma does not cover this setting. Its conditions 1 and 2 put N for the batch: right "
            "are eta <= q^2 N / L^2 and eta > 256 q^4 N / L^2. Its figure for Wang et al. leaves out a factor 2.5.",
            "The figure's curves other than the quoted points are not printed as numbers.",
        ),
    )
    return PaperOutcome((table, _samplers(steps)), (_step_figure(sizes, epsilons), _sensitivity_figure(context)))


def _largest(epsilon: float, steps: int, schedule: Any, **options: Any) -> Any:
    from confide.privacy.step_sizes import step_size_for

    facts: dict[str, Any] = {"records": RECORDS, "batch": BATCH, "clip": 1.0, "delta": DELTA, **options}
    return step_size_for(epsilon, steps=steps, schedule=schedule, **facts)


def _cost(step_size: float, steps: int) -> float:
    from confide.privacy.accountants import sound_epsilon
    from confide.privacy.events import GaussianEvent
    from confide.privacy.step_sizes import dp_sgmcmc_noise_multiplier

    noise = dp_sgmcmc_noise_multiplier(step_size, RECORDS, BATCH, 1.0)
    return sound_epsilon((GaussianEvent(noise, "poisson", BATCH / RECORDS, steps),), DELTA)


def _paper_cost(steps: int) -> float:
    """What 0.103 t^(-1/3) costs, each block of steps at its first."""
    from confide.privacy.accountants import sound_epsilon
    from confide.privacy.events import GaussianEvent
    from confide.privacy.step_sizes import decreasing_blocks, dp_sgmcmc_noise_multiplier

    first = dp_sgmcmc_noise_multiplier(PAPER_FIRST_STEP, RECORDS, BATCH, 1.0)
    blocks = decreasing_blocks(steps)
    events = tuple(GaussianEvent(first * t ** (1 / 6), "poisson", BATCH / RECORDS, count) for t, count in blocks)
    return sound_epsilon(events, DELTA)


def _samplers(steps: int) -> PaperTable:
    """The largest fixed step of every sampler, from the same noise multiplier."""
    rows: list[tuple[Cell, ...]] = []
    for name, title in (("sgld", "SGLD"), ("sghmc", "SGHMC, friction 0.1"), ("sgnht", "SGNHT, A h = 0.1")):
        found = _largest(PAPER_EPSILON, steps, "fixed", method=name, friction=0.1)
        rows.append((title, None, found.step_size, found.noise_multiplier, found.epsilon))
    return PaperTable(
        f"Largest fixed step size of every sampler at epsilon {PAPER_EPSILON:g}",
        ("sampler", "paper", "ours", "noise multiplier", "sound epsilon"),
        tuple(rows),
        (
            "The paper says that its analysis extends to these samplers and gives no numbers. `confide plan --method` "
            "computes them for any setting.",
        ),
    )


def _step_figure(sizes: dict[tuple[str, float], float], epsilons: tuple[float, ...]) -> Figure:
    titles = {"fixed": "fixed", "decreasing": "first of t^(-1/3)", "wang": "Wang et al. (2015)"}

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        for place, (name, title) in enumerate(titles.items()):
            values = [sizes[name, epsilon] for epsilon in epsilons]
            axes.plot(epsilons, values, color=COLOURS[place], marker=MARKERS[place], label=title)
        axes.plot(PAPER_EPSILON, PAPER_FIRST_STEP, "k*", markersize=10, label="the paper's 0.103 at 0.1 (unsound)")
        axes.set(yscale="log", xlabel="sound epsilon", ylabel="largest step size")
        _plain_ticks(axes)
        axes.legend(fontsize=9)

    return Figure("step_sizes", "Largest step sizes that keep a promised epsilon (the paper's Figure 1).", draw)


def _plain_ticks(axes: Any) -> None:
    """Powers of ten in plain text: 0.001, 1e-05."""
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")


def _sensitivity_figure(context: Context) -> Figure:
    """The paper's Figure 2: fixed steps with T = N and delta = 1/N, for N at L = 1 and for L at N = 10^4."""
    epsilons = (0.1, 1.0) if context.quick else (0.1, 0.3, 1.0, 1.7)
    counts = (1000, 10_000) if context.quick else (1000, 10_000, 100_000, 1_000_000)
    clips = (0.1, 0.5, 1.0, 10.0)
    of_size = {n: [_for_size(epsilon, n) for epsilon in epsilons] for n in counts}
    # The noise multiplier does not depend on L, so that the step size goes as 1 / L^2 exactly.
    of_clip = {clip: [step / clip**2 for step in of_size[10_000]] for clip in clips}

    def draw(canvas: Any) -> None:
        left, right = canvas.subplots(1, 2)
        for panel, curves, letter in ((left, of_size, "N"), (right, of_clip, "L")):
            for place, (value, steps) in enumerate(curves.items()):
                panel.plot(epsilons, steps, color=COLOURS[place], marker=MARKERS[place], label=f"{letter} = {value:g}")
            panel.set(yscale="log", xlabel="sound epsilon")
            _plain_ticks(panel)
            panel.legend(fontsize=9)
        left.set(ylabel="largest fixed step size", title="L = 1")
        right.set(title="N = 10000")

    caption = "Largest fixed step sizes for T = N, delta = 1/N (the paper's Figure 2): they go as 1 / L^2, not 1 / L."
    return Figure("step_size_sensitivity", caption, draw, (8.0, 3.6))


def _for_size(epsilon: float, records: int) -> float:
    size: float = _largest(epsilon, records, "fixed", records=records, delta=1 / records).step_size
    return size


PAPER = Paper(
    "dp-sgmcmc",
    "Towards more practical stochastic gradient MCMC in differential privacy",
    "Li, Chen, Liu and Carin, AISTATS 2019",
    (
        Experiment(
            "step-sizes",
            "largest step sizes for a promised epsilon (Figures 1 and 2)",
            run_step_sizes,
            minutes=0.25,
            once=True,
        ),
        Experiment(
            "adult", "Bayesian logistic regression, accuracy against epsilon (Figure 3)", adult.run, minutes=2.0
        ),
        Experiment("mnist", "classification of digits (Table 1)", digits.run, minutes=1.2),
        Experiment("pate", "Confident-GNMax, the rival of Table 1, with public images", teachers.run, minutes=3.0),
        Experiment(
            "gan", "a Bayesian GAN with 100 labelled images, not private (section 4)", gan_table.run, minutes=3.0
        ),
        Experiment(
            "gan-private",
            "the same by DP-SGHMC, at every epsilon",
            partial(gan_table.run, part="private"),
            quick=False,
            minutes=2,
        ),
        Experiment(
            "gan-pixels",
            "the same on pixels, with pictures",
            partial(gan_table.run, part="pixels"),
            quick=False,
            minutes=9,
        ),
    ),
    CLAIMS,
)
