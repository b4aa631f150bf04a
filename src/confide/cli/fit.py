"""`confide fit`: learn a posterior from private records, and write it down with its privacy statement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from confide import rules
from confide.cli import fit_options as given
from confide.cli import method_list, options
from confide.cli.help_texts import aligned, teach
from confide.cli.options import AdjacencyName, EpsilonGoal, Json, SamplingName
from confide.cli.output import called_as, emit_json, for_this_command, one_line, output, progress_bar, remarks
from confide.cli.paths import check_checkpoint, check_ledger, check_new_directory, ledger_by, same_file, usual_directory
from confide.errors import BudgetExceeded, CommandError, RankLost, Refusal, Unfinished

if TYPE_CHECKING:
    from confide.mechanism.gaussian import ClippingStyle
    from confide.workflow.run import Job

EXAMPLES = (
    "confide fit pictures.npz --epsilon 1",
    "confide fit digits --method sgld --epsilon 3 --delta 1e-4 --out out/digits",
    "confide fit train.csv --target income --facts facts.toml --test test.csv \\\n  --epsilon 1 --out out/run",
    "confide fit train.csv --target income --facts facts.toml --module net.py:Net \\\n  --epsilon 1 --out out/own",
)


def fit(
    train: given.Trains,
    *,
    target: given.Target = None,
    test: given.Test = None,
    facts: given.Facts = None,
    assume_public: given.AssumePublic = False,
    task: given.TaskName = None,
    data: given.DataDirectory = None,
    split: given.Split = None,
    method: given.MethodName = "auto",
    hidden: given.Hidden = None,
    module: given.OwnModule = None,
    batch: given.Batch = None,
    epochs: given.Epochs = None,
    steps: given.Steps = None,
    clip: given.Clip = None,
    clipping: given.ClippingName = "flat",
    adaptive_clip: given.AdaptiveClipQuantile = None,
    clip_schedule: given.ClipSchedule = None,
    chains: given.Chains = 1,
    prior: given.PriorName = None,
    prior_scale: given.PriorScale = None,
    noise_scale: given.NoiseScale = None,
    likelihood: given.LikelihoodName = None,
    class_weight: given.ClassWeight = None,
    setting: given.Settings = None,
    device: given.Device = None,
    epsilon: EpsilonGoal,
    delta: given.Delta = rules.DELTA,
    adjacency: AdjacencyName = rules.ADJACENCY,
    sampling: SamplingName = rules.SAMPLING,
    secure: given.Secure = False,
    bayesian_holdout: given.HoldOutFile = None,
    ledger: given.LedgerFile = None,
    name: given.DataName = None,
    key: given.LedgerKey = None,
    who: given.Who = None,
    out: given.OutOrUsual = None,
    checkpoint: given.Checkpoint = None,
    resume: given.Resume = None,
    validation: given.ValidationFile = None,
    seed: given.Seed = None,
    as_json: Json = False,
) -> None:
    """Learn a Bayesian model from private records within a privacy budget.

    Everything is checked first, then the whole run is charged, and only then is a record used. DIR receives the
    posterior, a record of the run and a report. Of a run that fails nothing is written there; what was paid for is
    kept, and if the report cannot be written, the posterior is. Under torchrun (torchrun -m confide fit ...) all
    processes make one fit together, each with a slice of the records.
    """
    from confide.cli import outcome
    from confide.cli.own_code import own_module
    from confide.cli.records import Records
    from confide.cli.settings import method_or_rule
    from confide.data.loaders import load_table
    from confide.distributed import started_together
    from confide.running.live import LiveCurves
    from confide.workflow.facts import settle
    from confide.workflow.measure import check_test, measured
    from confide.workflow.run import carry_out, job_of

    records = Records.of_parts(train, target, test, facts, assume_public, data, split, options.task(task))
    chosen = method_or_rule(method, setting or (), prior_scale, prior)
    widths, by_class = options.layers(hidden), options.class_weights(class_weight)
    plan = options.plan_options(epsilon, delta, batch, epochs, steps, clip, sampling, adjacency, noise_scale, chains)
    options.choice("--clipping", clipping, given.CLIPPING_STYLES)
    clips = options.clips(clip_schedule)
    if adaptive_clip is not None:
        options.number("--adaptive-clip", adaptive_clip, above=0, below=1)
    if bayesian_holdout is not None and any(
        same_file(bayesian_holdout, part) for part in (records.train, *records.more)
    ):
        raise CommandError(f"--bayesian-holdout={bayesian_holdout}: is the training file; its records are private")
    options.seed(seed)
    records.check()
    out = out or usual_directory(records.train)
    check_new_directory("--out", out)
    network = own_module(module, seed)
    checkpoint = check_checkpoint(checkpoint, resume)
    for_this_command(ledger_by(ledger, key, who))
    check_ledger(ledger)

    dataset = records.load()
    fresh = (
        None
        if bayesian_holdout is None
        else load_table(bayesian_holdout, dataset.train.target, part="test", schema=dataset.schema)
    )
    public = (
        None if validation is None else load_table(validation, dataset.train.target, part="test", schema=dataset.schema)
    )
    with options.named(), _interruptible(checkpoint), started_together() as ranks:
        request = records.request(
            dataset,
            name,
            **plan,
            clipping=cast("ClippingStyle", clipping),
            adaptive_clip=adaptive_clip,
            clip_schedule=clips,
            method=chosen,
            hidden=widths,
            module=network,
            likelihood=likelihood,
            class_weight=by_class,
            hold_out=fresh,
            device=device,
            secure=secure,
            checkpoint=checkpoint,
            ledger=ledger,
            seed=seed,
            ranks=ranks,
            callbacks=() if public is None else (LiveCurves(),),
            validation=public,
        )
        request.check()
        settled = settle(request)
        if dataset.test is not None:
            check_test(dataset.test, settled.encoder)
        job = job_of(request, settled)
        if ranks is None or ranks.leads:
            _tell_time(job)
        bar = public is None and (ranks is None or ranks.leads)  # curves say how far the run is
        with progress_bar(f"{job.method.name} on {dataset.name}", bar) as progress:
            found = carry_out(job, progress)
    if ranks is not None and not ranks.leads:
        return  # rank 0 holds the same run, and writes it
    run, encoder, held_out = found.run, found.encoder, dataset.test
    evaluation, summary = outcome.save(
        run,
        out,
        lambda: None if held_out is None else measured(run.posterior, encoder, held_out, records.test_source),
        outcome.config_of(records, request, found.hidden, found.bayesian, module),
        encoder,
    )
    if found.bayesian is not None:
        summary["bayesian"] = found.bayesian.to_dict()
    if as_json:
        emit_json(summary)
    else:
        outcome.show(output(), run, summary, evaluation)
        if found.bayesian is not None:
            output().print(outcome.bayesian_line(found.bayesian))


def _tell_time(job: Job) -> None:
    """Say how long a long fit will take, before it starts; what cannot be timed is about to be refused."""
    from confide.workflow.forecast import WORTH_TELLING, expected_seconds, in_words

    with suppress(Exception):
        seconds = expected_seconds(job)
        if seconds >= WORTH_TELLING:
            remarks().print(f"{job.method.name}: about {in_words(seconds)} for {job.plan.steps:,} steps")


@contextmanager
def _interruptible(checkpoint: Path | None) -> Iterator[None]:
    """Say which command goes on with a run that was interrupted from the keyboard, or by what nobody foresaw."""
    try:
        yield
    except KeyboardInterrupt:
        if checkpoint is None or not checkpoint.exists():
            raise
        raise KeyboardInterrupt(
            f"interrupted; what was paid for is kept in {checkpoint}, and the same command goes on: {called_as()}"
        ) from None
    except Exception as error:
        if isinstance(error, Refusal | BudgetExceeded | Unfinished | RankLost):
            raise
        if checkpoint is None or not checkpoint.exists():
            raise
        kept = f"what was paid for is kept in {checkpoint}, and the same command goes on: {called_as()}"
        raise Unfinished(f"{type(error).__name__} ({one_line(str(error))}); {kept}", checkpoint) from error


def methods_listed() -> str:
    return f"Methods, with the settings that --set takes:\n{aligned(method_list.listed())}"


def register(app: Any) -> None:
    teach(app, fit, EXAMPLES, closing=methods_listed)
