"""The options of `confide fit`, in the order of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from confide import rules
from confide.cli.options import DATA, OUTPUT, PRIVACY, RUN
from confide.wording import KEY_VARIABLE, WHO_VARIABLE

NAMED = (
    "poisson", "negative-binomial", "laplace", "student-t", "ordinal", "exponential", "weibull", "multi-label",
    "multi-gaussian",
)  # fmt: skip
"""The names that `workflow.named_likelihood` knows, written out so that the help needs no torch."""

CLIPPING_STYLES = ("flat", "per-layer", "automatic")  # those of `mechanism.gaussian`, for the same reason

Train = Annotated[
    str,
    typer.Argument(
        metavar="TRAIN",
        help="A file (.csv, .csv.gz, .parquet, .npz), a folder of pictures, an embedded set (digits, diabetes), "
        "or a benchmark's name with --data.",
        show_default=False,
    ),
]
Trains = Annotated[
    list[str],
    typer.Argument(
        metavar="TRAIN",
        help="A file (.csv, .csv.gz, .parquet, .npz), a folder of pictures, an embedded set (digits, diabetes), "
        "or a benchmark's name with --data. Several .parquet files are one table.",
        show_default=False,
    ),
]
Target = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="The column to predict.", rich_help_panel=DATA, show_default=False),
]
Test = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Records to measure on. Passing them declares them public or separate: what is measured is published.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Facts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml",
        help="The public facts: range or categories of each column, classes, number of records.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
AssumePublic = Annotated[
    bool,
    typer.Option(
        "--assume-public",
        metavar="",
        help="Read the facts left open off the data. They are then not protected, and the report says so.",
        rich_help_panel=DATA,
    ),
]
TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="NAME",
        help="classification or regression, where --assume-public should not guess.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
DataDirectory = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="Directory of the benchmark files.", rich_help_panel=DATA, show_default=False
    ),
]
Split = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Which published split of a benchmark; 0 if left out.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="NAME",
        help=f"The method; the list stands below. auto is the public rule: additive or tabular, "
        f"{rules.PICTURES} for pictures and for more than two classes of more than {rules.MOST_COLUMNS} columns, "
        f"{rules.LINEAR} for a linear model, {rules.SAMPLER} for other networks, and where batches or steps are given.",
        rich_help_panel=RUN,
    ),
]
Hidden = Annotated[
    str | None,
    typer.Option(
        metavar="W,W",
        help='Widths of the hidden layers, such as 64,64; "" for a linear model. Rule: one layer of 64 where '
        "records * epsilon is at least 10 times its weights, else none; epsilon counts as 1 at most in regression.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
OwnModule = Annotated[
    str | None,
    typer.Option(
        "--module",
        metavar="FILE:NAME",
        help="Your own network, in place of --hidden: a torch module in a Python file, or a class or function without "
        "arguments that gives one. It takes the encoded features of a batch; nn.LazyLinear counts them by itself. The "
        "file is run, and predict, evaluate and export want the same --module.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        metavar="B",
        help="Expected records per step. Rule for n declared records: n / 32, at least 128, at most n / 4.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Epochs = Annotated[
    float | None,
    typer.Option(
        metavar="E",
        help=f"Passes over the data. Rule: {rules.EPOCHS:g}.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(metavar="T", help="Number of steps, instead of --epochs.", rich_help_panel=RUN, show_default=False),
]
Clip = Annotated[
    float | None,
    typer.Option(
        metavar="C",
        help=f"Largest norm of one record's answer. Rule: {rules.CLIP:g}, up to {rules.MOST_CLIP:g} for classes.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Chains = Annotated[
    int,
    typer.Option(
        metavar="K",
        help="Independent chains of a sampler, all of them together within the budget; the report says if they agree.",
        rich_help_panel=RUN,
    ),
]
ClippingName = Annotated[
    str,
    typer.Option(
        "--clipping",
        metavar="STYLE",
        help=f"How answers are cut to --clip: {', '.join(CLIPPING_STYLES)}.",
        rich_help_panel=RUN,
    ),
]
AdaptiveClipQuantile = Annotated[
    float | None,
    typer.Option(
        "--adaptive-clip",
        metavar="Q",
        help="Let the clip follow the norm below which a share Q of the answers lies, by counts that are paid for "
        "within epsilon; --clip is where it starts.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
ClipSchedule = Annotated[
    str | None,
    typer.Option(
        "--clip-schedule",
        metavar="C,C",
        help="Clips that change over time, such as 3,1.5,0.75, each for an equal part of the steps, in place of "
        "--clip; the budget is the same.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
PriorName = Annotated[
    str | None,
    typer.Option(
        "--prior",
        metavar="NAME",
        help="The prior on the weights: gaussian, laplace, scale-mixture or flat; the method's own if left out.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
PriorScale = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="Scale of the prior on the weights, the standard deviation of a Gaussian one; the method's own if left "
        "out.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
NoiseScale = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="Regression: standard deviation of the target around the model, where its bounds are scaled to [-1, 1]. "
        "Left out: learnt from the records, for a fifth of epsilon at most; the whole run stays within epsilon.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
LikelihoodName = Annotated[
    str | None,
    typer.Option(
        "--likelihood",
        metavar="NAME",
        help=f"How outputs explain the target, where the usual one of the task does not fit: {', '.join(NAMED)}. "
        "Counts need target_bounds among the facts; laplace and student-t take --noise-scale. Times (observed among "
        "the facts) and several targets (targets among the facts) have theirs by themselves.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
ClassWeight = Annotated[
    list[str] | None,
    typer.Option(
        "--class-weight",
        metavar="LABEL=W",
        help="Public weight of a class; may be repeated, classes not named have 1, and the largest counts as one "
        "record. Weights of records are a column that the facts name: weight, largest_weight.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
HoldOutFile = Annotated[
    Path | None,
    typer.Option(
        "--bayesian-holdout",
        metavar="FILE",
        help="Fresh records like these that nobody needs to protect, not learnt from: a Bayesian epsilon for records "
        "drawn like them is told beside the DP one.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the method, such as decay=0.33; may be repeated.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Delta = Annotated[
    float,
    typer.Option(
        metavar="D", help="Probability with which the budget may fail; below 1 / records.", rich_help_panel=PRIVACY
    ),
]
LedgerFile = Annotated[
    Path | None,
    typer.Option(
        "--ledger",
        metavar="FILE",
        help="Where the run is charged before any record is read; its ceiling can refuse the run.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
DataName = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="The data set's name in the ledger; the file's name if left out. Same records, same name.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
LedgerKey = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="The curator's key, by which the ledger knows records whatever their file is called. Left out: the file "
        f"that {KEY_VARIABLE} names, or LEDGER.key, made at the first charge.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
Who = Annotated[
    str | None,
    typer.Option(
        "--who",
        metavar="NAME",
        help=f"Who runs this, for the ledger; {WHO_VARIABLE} or the system's name of the user if left out.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
OutOrUsual = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="New directory for posterior.safetensors, run.json and report.html; out/ with the name of TRAIN if it is "
        "left out.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        help="New directory for posterior.safetensors, run.json and report.html.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep the run there while it lasts: after an interruption the same command goes on with it.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
ValidationFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Public records like those of TRAIN: curves of the metrics on them are shown while the run lasts.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Go on with the run that --checkpoint kept there; refused, and nothing charged, where there is none.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Secure = Annotated[
    bool,
    typer.Option(
        "--secure",
        help="Noise on a lattice, against attacks on the low-order bits of floating-point numbers; same epsilon.",
        rich_help_panel=PRIVACY,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Where the network is: cuda, mps, or another device that torch knows.  [default: cpu]",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="For tests only: makes the noise predictable, and everything is stamped as not private.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
