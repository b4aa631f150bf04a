"""Li, Chen, Liu and Carin (2019): step sizes whose own noise is private, Adult against epsilon, MNIST."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from confide.papers import protocol, sets
from confide.papers.base import (
    COLOURS,
    MARKERS,
    Cell,
    Context,
    Experiment,
    Figure,
    Paper,
    PaperMeasure,
    PaperOutcome,
    PaperTable,
)
from confide.papers.dp_sgmcmc import adult, gan_table, teachers
from confide.papers.dp_sgmcmc.claims import CLAIMS
from confide.papers.mnist_cnn import DESCRIPTION, encoded, learnt_cnn

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


OUR_RATE, HIDDEN = 3.0, 64
CNN_RATE, CNN_PRIOR, CNN_EPOCHS = 2.0, 0.2, 6.5  # those of SGLD on the CNN of dp-bnn
MNIST_EPSILON, PAPER_RATE, PAPER_CLIP, PAPER_BATCH, PAPER_EPOCHS = 0.99, 0.3, 0.3, 128, 20


def run_mnist(context: Context) -> PaperOutcome:
    """Table 1: the paper's own settings, priced soundly, ours at the epsilon it claims, and its rivals."""
    found = _grey(sets.load("mnist", context))
    rows: list[tuple[Cell, ...]] = []
    did: list[str] = []
    wanted: tuple[tuple[str, str, float, Callable[[sets.Set, Context, int], Any], str], ...] = (
        ("DP-SGLD, the paper's settings", "0.99", 0.9921, _paper_run, protocol.AS_PRINTED),
        ("DP-SGLD, ours", "0.99", 0.9921, _our_run, protocol.ASSUMED_PUBLIC),
        ("DP-SGLD, ours, CNN", "0.99", 0.9921, _cnn_run, protocol.ASSUMED_PUBLIC),
        ("DP-SGD", "0.5", 0.90, partial(_sgd_run, epsilon=0.5), "no data: its public rule"),
        ("DP-SGD", "8", 0.97, partial(_sgd_run, epsilon=8.0), "no data: its public rule"),
        ("SGLD, not private", "none", 0.9934, _open_run, protocol.ASSUMED_PUBLIC),
    )
    printed_noise, printed_epsilons = 0.0, (0.0, 0.0)
    for title, claimed, paper, make, where in wanted:
        runs = []
        given = _for_cnn(found) if "CNN" in title else found
        for seed in context.seeds:
            runs.append(make(given, context, seed))
            context.progress("MNIST", len(rows) * len(context.seeds) + len(runs), len(wanted) * len(context.seeds))
        ours = PaperMeasure(tuple(_accuracy(given, run) for run in runs))
        rows.append((title, claimed, paper, ours, max(run.privacy.epsilon() for run in runs), where))
        if where == protocol.AS_PRINTED:
            printed_noise = runs[0].plan.mechanism.noise_multiplier
            replaced = replace(runs[0].privacy, adjacency="replace-one").epsilon()
            printed_epsilons = (runs[0].privacy.epsilon(), replaced)
        did.append(f"{title}: {protocol.ran(runs[0].plan, context.seeds)}.")
    table = PaperTable(
        f"MNIST, test accuracy, delta {DELTA:g}",
        ("method", "epsilon in the paper", "paper", "ours", "sound epsilon", protocol.CHOSEN_ON),
        tuple(rows),
        (
            f"Ours: a fully connected network with one hidden layer of {HIDDEN} on pixels scaled to [0, 1], where the "
            f"paper has two convolutional layers. First row: step {PAPER_RATE:g} and the update as the paper prints "
            f"it. Second row: the step such that n eta / 2 = {OUR_RATE:g}. That step and the scale of the pixels were "
            "compared on the last 10 000 training records, taken as public; the official test part was not used for "
            "choosing. The CNN's rate and prior are those of dp-bnn, settled on the same public images, and DP-SGD's "
            "rate is that of its public rule.",
            f"The paper's network has two convolutions and a layer of ReLUs; ours: {DESCRIPTION}.",
            "The 99.21 % cannot be had this way. As they run here the paper's settings cost "
            f"{printed_epsilons[0]:.2f} under add/remove and Poisson sampling and {printed_epsilons[1]:.2f} under the "
            f"replace-one adjacency it states, and a chain of gradients clipped to {PAPER_CLIP:g} under noise of "
            f"{printed_noise:.2g} times that stays far from its non-private accuracy, which the paper's comes within "
            "0.13 points of. Published sound results at epsilon 1 to 1.2 end near 98 %.",
            " ".join(did),
            "SVHN (91.89 % at a claimed 2.97) is not run: the batch is not given, and at 128 its settings cost an "
            "epsilon in the thousands.",
            *found.notes,
        ),
    )
    return PaperOutcome((table,))


def _grey(found: sets.Set) -> sets.Set:
    """Pixels in [0, 1], so that the background is zero: by the declared bounds alone."""
    return replace(found, x=(found.x + 1) / 2, x_test=(found.x_test + 1) / 2)


def _for_cnn(found: sets.Set) -> sets.Set:
    """Every image normalised by itself."""
    return replace(found, x=encoded(found.x), x_test=encoded(found.x_test))


def _paper_run(found: sets.Set, context: Context, seed: int) -> Any:
    from confide.mechanism.plan import plan
    from confide.methods.sgld import SGLD
    from confide.privacy.step_sizes import dp_sgmcmc_noise_multiplier

    records, batch = found.records, min(PAPER_BATCH, found.records // 8)
    epochs = 2 if context.quick else PAPER_EPOCHS
    noise = dp_sgmcmc_noise_multiplier(PAPER_RATE, records, batch, PAPER_CLIP)
    made = plan(delta=DELTA, records=records, batch=batch, epochs=epochs, noise_multiplier=noise, clip=PAPER_CLIP)
    # The paper's step multiplies the mean gradient; ours the sum.
    method = SGLD(step_size=PAPER_RATE / records, convention="paper")
    return _fitted(found, context, method, made, seed)


def _our_run(found: sets.Set, context: Context, seed: int) -> Any:
    from confide.mechanism.plan import plan
    from confide.methods.sgld import SGLD

    batch, epochs = (256, 5) if context.quick else (1024, 20)
    made = plan(delta=DELTA, records=found.records, batch=batch, epochs=epochs, epsilon=MNIST_EPSILON, clip=1.0)
    return _fitted(found, context, SGLD(step_size=2 * OUR_RATE / found.records), made, seed)


def _cnn_run(found: sets.Set, context: Context, seed: int) -> Any:
    """The convolutional network at the same epsilon; the clip is the one at which privacy noise is Langevin noise."""
    from confide.mechanism.plan import plan
    from confide.methods.sgld import SGLD
    from confide.models.priors import GaussianPrior

    batch, epochs = (256, 2.0) if context.quick else (2048, CNN_EPOCHS)
    facts: dict[str, Any] = {"delta": DELTA, "records": found.records, "batch": min(batch, found.records)}
    draft = plan(**facts, epochs=epochs, epsilon=MNIST_EPSILON, clip=1.0)
    noise = draft.mechanism.noise_multiplier
    clip = draft.expected_batch / noise * math.sqrt(2 / (found.records * CNN_RATE))
    made = plan(**facts, epochs=epochs, noise_multiplier=noise, clip=clip)
    classes = found.schema.class_count
    assert classes is not None  # the catalogue declares ten
    network = learnt_cnn(math.isqrt(found.x.shape[1]), classes, seed)
    method = SGLD(prior=GaussianPrior(CNN_PRIOR))
    return _fitted(found, context, method, made, seed, network)


def _sgd_run(found: sets.Set, context: Context, seed: int, epsilon: float) -> Any:
    from confide.mechanism.plan import plan
    from confide.methods.sgd import SGD

    batch, epochs = (256, 5) if context.quick else (1024, 20)
    made = plan(delta=DELTA, records=found.records, batch=batch, epochs=epochs, epsilon=epsilon, clip=1.0)
    return _fitted(found, context, SGD(optimiser="momentum", averaging=0.3), made, seed)


def _open_run(found: sets.Set, context: Context, seed: int) -> Any:
    from confide.mechanism.plan import plan
    from confide.methods.sgld import SGLD

    batch, epochs = (256, 5) if context.quick else (1024, 20)
    made = plan(delta=DELTA, records=found.records, batch=batch, epochs=epochs, private=False, clip=math.inf)
    return _fitted(found, context, SGLD(step_size=0.4 / found.records), made, seed)


def _fitted(found: sets.Set, context: Context, method: Any, made: Any, seed: int, network: Any = None) -> Any:
    from confide.models.networks import mlp
    from confide.running.fit import fit
    from confide.workflow.network import generator_of

    classes = found.schema.class_count
    assert classes is not None  # the catalogue declares ten
    if network is None:
        network = mlp(found.x[0].numel(), classes, hidden=(HIDDEN,), generator=generator_of(seed))
    return fit(method, network, found.private(context), made, seed=seed)


def _accuracy(found: sets.Set, run: Any) -> float:
    return float((run.posterior.predict(found.x_test).labels == found.y_test).double().mean())


PAPER = Paper(
    "dp-sgmcmc",
    "Towards more practical stochastic gradient MCMC in differential privacy",
    "Li, Chen, Liu and Carin, AISTATS 2019",
    (
        Experiment(
            "step-sizes", "largest step sizes for a promised epsilon (Figures 1 and 2)", run_step_sizes, minutes=0.25
        ),
        Experiment(
            "adult", "Bayesian logistic regression, accuracy against epsilon (Figure 3)", adult.run, minutes=2.0
        ),
        Experiment("mnist", "classification of digits (Table 1)", run_mnist),
        Experiment("pate", "Confident-GNMax, the rival of Table 1, with public images", teachers.run, minutes=4.1),
        Experiment(
            "gan", "a Bayesian GAN with 100 labelled images, not private (section 4)", gan_table.run, minutes=3.0
        ),
        Experiment(
            "gan-private", "the same by DP-SGHMC, at every epsilon", partial(gan_table.run, part="private"), quick=False
        ),
        Experiment(
            "gan-pixels", "the same on pixels, with pictures", partial(gan_table.run, part="pixels"), quick=False
        ),
    ),
    CLAIMS,
)
