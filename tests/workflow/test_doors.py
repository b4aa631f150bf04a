"""One request, three doors: the command line, the estimators and Python give one plan, one network, one posterior."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import confide
from confide import rules
from confide.data.loaders import load_table
from confide.data.schema import Column, Schema
from confide.data.table import Table
from confide.errors import BudgetExceeded, Refusal
from confide.estimators import PrivateBayesClassifier, PrivateBayesRegressor
from confide.methods.sgld import SGLD
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import merged
from confide.privacy.ledger import Ledger
from confide.running.artefacts import load_run
from confide.running.dress_rehearsal import FEW_STEPS
from confide.running.journal import Checkpoints
from confide.workflow.compare import compare
from confide.workflow.facts import settle
from confide.workflow.request import Request
from confide.workflow.run import Outcome, job_of, run_request
from tests.cli.conftest import call

ROWS = 3300
"""So many that the rule gives the network a hidden layer: a door that ignored the rule would differ."""
FACTS = {
    "classification": 'target = "kind"\nclasses = ["a", "b"]\nbounds = [-1, 1]\n',
    "regression": 'target = "size"\ntarget_bounds = [-3, 3]\nbounds = [-1, 1]\n',
}
PLAN: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "steps": 12, "seed": 5}


def columns(task: str) -> tuple[Column, ...]:
    return (Column("p"), Column("q"))


def frame(task: str) -> pd.DataFrame:
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (ROWS, 2)).round(6)
    line = x[:, 0] - 0.5 * x[:, 1] + 0.1 * random.standard_normal(ROWS)
    found = pd.DataFrame(x, columns=["p", "q"])
    found["kind" if task == "classification" else "size"] = (
        np.where(line > 0, "b", "a") if task == "classification" else line.round(6)
    )
    return found


class Doors:
    """The same request behind every door."""

    def __init__(self, task: str, folder: Path, records: int | None = ROWS) -> None:
        self.task, self.folder = task, folder
        self.table = frame(task)
        self.table.to_csv(folder / "train.csv", index=False)
        size = "" if records is None else f"records = {records}\n"
        (folder / "facts.toml").write_text(size + FACTS[task])
        self.schema = Schema.from_toml(folder / "facts.toml")

    def python(self, **more: Any) -> Outcome:
        records = load_table(self.folder / "train.csv", self.schema.target, schema=self.schema)
        return run_request(Request(records, facts=self.schema, **{**PLAN, **more}))

    def estimator(self, **more: Any) -> Any:
        cls = PrivateBayesClassifier if self.task == "classification" else PrivateBayesRegressor
        target = self.schema.target
        assert target is not None
        return cls(schema=self.schema, **{**PLAN, **more}).fit(self.table.drop(columns=target), self.table[target])

    def command(self, *more: object) -> Any:
        out = self.folder / "run"
        typed = [word for name, value in PLAN.items() for word in (f"--{name}", value)]
        files = (self.folder / "train.csv", "--facts", self.folder / "facts.toml", "--out", out)
        result = call("fit", *files, *typed, *more, "--json")
        assert result.code == 0, result.err
        return load_run(out)


def numbers(posterior: Any) -> torch.Tensor:
    found: torch.Tensor = posterior.draws
    return found


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("records", [ROWS, None], ids=["declared", "counted"])
def test_three_doors_one_posterior(task: str, records: int | None, tmp_path: Path) -> None:
    """Catches a default of one door: another clip, network, batch, noise of the target or count."""
    doors = Doors(task, tmp_path, records)
    outcome, model, saved = doors.python(), doors.estimator(), doors.command()
    run = outcome.run
    assert outcome.hidden == ((64,) if records else outcome.hidden)
    assert run.plan == model.run_.plan
    assert run.privacy == model.privacy_
    assert saved.privacy.events == run.privacy.events
    plan = saved.record["plan"]
    mechanism = run.plan.mechanism
    assert (plan["records"], plan["steps"], plan["target_epsilon"]) == (run.plan.records, run.plan.steps, 8.0)
    shown = plan["blocks"][0]
    assert (shown["clip"], shown["rate"], shown["noise_multiplier"]) == (
        mechanism.clip,
        mechanism.rate,
        mechanism.noise_multiplier,
    )
    assert saved.record["config"]["hidden"] == list(outcome.hidden or ())
    torch.testing.assert_close(numbers(model.posterior_), numbers(run.posterior), rtol=0, atol=0)
    torch.testing.assert_close(numbers(saved.posterior), numbers(run.posterior), rtol=0, atol=0)
    assert saved.posterior.likelihood == run.posterior.likelihood == model.posterior_.likelihood
    assert 7.9 < run.privacy.epsilon() <= 8.0


def test_the_clip_of_classes_follows_records_budget_and_declared_columns() -> None:
    """Clip 2 on such tables gave calibration errors of .04 at epsilon 1 and .09 at 8, whatever the method."""
    columns = (*(Column(f"n{place}", bounds=(0, 9)) for place in range(6)), Column("c", categories=tuple(range(5))))
    table = Table({column.name: np.arange(12_000) % 5 for column in columns}, target="y", labels=np.arange(12_000) % 2)
    schema = Schema(records=12_000, columns=columns, target="y", classes=2)

    def clip(method: str, epsilon: float, **options: Any) -> float:
        request = Request(table, epsilon, 1e-5, schema, method=method, **options)
        return job_of(request, settle(request)).plan.mechanism.clip

    usual = math.sqrt(2 * (1 + 6 / 3 + 1))
    for method in ("sgld", "sgd", "bbp", "mc-dropout", "traced"):
        assert clip(method, 0.4) == pytest.approx(usual)
        assert clip(method, 8.0) == pytest.approx(2 * usual)
        assert clip(method, 0.05) == rules.CLIP
        assert clip(method, 8.0, clip=3.0) == 3.0
    assert clip("additive", 8.0) == clip("last-layer", 8.0) == rules.CLIP
    assert rules.default_clip(60_000, 100.0, 784, 0, (784, 10)) == rules.MOST_CLIP


def test_defaults_are_the_rules_behind_every_door() -> None:
    """Catches a default that is written down a second time, and differs one day."""
    shared = {"clip": rules.CLIP, "sampling": rules.SAMPLING, "adjacency": rules.ADJACENCY, "delta": rules.DELTA}
    doors: tuple[Any, ...] = (confide.plan, Request, PrivateBayesClassifier, PrivateBayesRegressor)
    for door in (*doors, *(import_module(f"confide.cli.{name}").__dict__[name] for name in ("fit", "compare", "plan"))):
        for name, parameter in inspect.signature(door).parameters.items():
            if name in shared and parameter.default not in (inspect.Parameter.empty, None):
                assert parameter.default == shared[name], f"{door.__name__}({name}=)"
    assert confide.plan(noise_multiplier=1.0, delta=1e-5, records=100, batch=10, steps=1).mechanism.clip == rules.CLIP


def test_the_noise_of_a_small_linear_regression_is_not_learnt_from_a_network_too_wide() -> None:
    """True noise 3; a hidden layer, which the rule gave 600 records at epsilon 8 before, makes 7 of it."""
    random = np.random.RandomState(1)
    x = random.uniform(-1, 1, (600, 2))
    y = 50 + 12 * x[:, 0] - 8 * x[:, 1] + 3 * random.standard_normal(600)
    model = PrivateBayesRegressor(epsilon=8.0, bounds=(-1, 1), target_bounds=(0, 100), records=600, seed=1).fit(x, y)
    assert 2.4 < model.posterior_.noise_scale * model.encoder_.target_scale < 3.8


def test_options_behind_every_door(tmp_path: Path) -> None:
    """Sampling, adjacency, secure noise and chains reach the plan whoever asks."""
    doors = Doors("classification", tmp_path)
    options: dict[str, Any] = {"sampling": "fixed-size", "adjacency": "replace-one", "secure": True, "chains": 2}
    options |= {"batch": 90, "hidden": ()}
    outcome, model = doors.python(**options), doors.estimator(**options)
    typed = ("--sampling", "fixed_size", "--adjacency", "replace-one", "--secure", "--chains", 2)
    saved = doors.command(*typed, "--batch", 90, "--hidden", "")
    assert outcome.run.plan == model.run_.plan
    assert outcome.run.plan.mechanism.secure
    assert outcome.run.plan.mechanism.sampling == "fixed-size"
    assert saved.record["plan"]["blocks"][0]["secure"]
    assert saved.privacy.events == outcome.run.privacy.events
    assert outcome.run.privacy.epsilon() <= 8.0
    assert outcome.run.posterior.facts["chains"] == 2
    torch.testing.assert_close(numbers(saved.posterior), numbers(outcome.run.posterior), rtol=0, atol=0)


def test_chains_and_the_histogram_are_stated_as_they_are_charged(tmp_path: Path) -> None:
    """The side question is paid with all chains in one go; a statement that left it out would claim too little."""
    book = Ledger()
    run = Doors("regression", tmp_path).python(chains=2, ledger=book, seed=None, hidden=()).run
    assert sound_epsilon(book.events(), 1e-5) == pytest.approx(run.privacy.epsilon())
    assert run.privacy.epsilon() <= 8.0


@pytest.mark.parametrize("method", ["sgd", "sghmc"])
def test_naming_a_method_does_not_change_the_network(method: str, tmp_path: Path) -> None:
    doors = Doors("classification", tmp_path)
    assert doors.python(method=method).hidden == doors.python().hidden == rules.WIDE_LAYER


def test_fit_and_compare_train_the_same(tmp_path: Path) -> None:
    """The row of a comparison is the fit that the same request gives alone."""
    doors = Doors("regression", tmp_path)
    records = load_table(doors.folder / "train.csv", "size", schema=doors.schema)
    request = Request(records, facts=doors.schema, **PLAN)
    found = compare(request, records.take(range(50)), ["sgld"], out=tmp_path / "table")
    alone = run_request(request).run
    saved = load_run(tmp_path / "table" / "sgld")
    torch.testing.assert_close(numbers(saved.posterior), numbers(alone.posterior), rtol=0, atol=0)
    assert found.hidden == rules.WIDE_LAYER
    assert json.loads((tmp_path / "table" / "comparison.json").read_text())["rows"] == [found.rows[0].flat()]
    assert confide.compare is compare


def test_comparing_needs_a_known_number_and_no_checkpoint(tmp_path: Path) -> None:
    doors = Doors("classification", tmp_path, records=None)
    records = load_table(doors.folder / "train.csv", "kind", schema=doors.schema)
    with pytest.raises(Refusal, match="records: not declared"):
        compare(Request(records, facts=doors.schema), records)
    with pytest.raises(Refusal, match="checkpoint: keeps one fit"):
        compare(Request(records, facts=doors.schema, assume_public=True, checkpoint=tmp_path / "c"), records)


def test_a_comparison_is_charged_as_a_whole_before_a_record_is_read(tmp_path: Path) -> None:
    """Room for one method and not for two: nothing is charged and nothing is fitted."""
    doors = Doors("classification", tmp_path)
    records = load_table(doors.folder / "train.csv", "kind", schema=doors.schema)
    request = Request(records, facts=doors.schema, **{**PLAN, "seed": None}, name="d", hidden=())
    narrow, wide = Ledger(), Ledger()
    narrow.limit(9.0, 1e-5)
    with pytest.raises(BudgetExceeded):
        compare(replace(request, ledger=narrow), records.take(range(50)), ["sgld", "sgd"], out=tmp_path / "table")
    assert narrow.entries() == ()
    assert not (tmp_path / "table").exists()
    charged: list[int] = []
    found = compare(
        replace(request, ledger=wide),
        records.take(range(50)),
        ["sgld", "sgd"],
        repeats=2,
        progress=lambda done, total: charged.append(len(wide.entries())),
    )
    assert len(set(charged)) == 1  # from the first step on everything is paid for
    assert set(found.events) == set(wide.events("d"))
    assert found.total_epsilon == pytest.approx(sound_epsilon(wide.events("d"), 1e-5))
    assert found.fits == 4


def test_a_comparison_with_a_sampler_that_counts_records_chains_and_a_network_of_ones_own(tmp_path: Path) -> None:
    doors = Doors("classification", tmp_path)
    records = load_table(doors.folder / "train.csv", "kind", schema=doors.schema)
    more: dict[str, Any] = {"sampling": "fixed-size", "adjacency": "replace-one", "batch": 100, "chains": 2}
    request = Request(records, facts=doors.schema, **{**PLAN, **more}, module=torch.nn.Linear(2, 2))
    found = compare(request, records.take(range(50)), ["sgld", "sgd"], out=tmp_path / "table")
    assert "those of your own network" in (tmp_path / "table" / "report.html").read_text()
    assert [row.method for row in found.rows] == ["sgld"]
    assert "chains need a sampler" in found.not_run["sgd"]
    assert found.to_dict()["hidden"] is None
    with pytest.raises(Refusal, match="method='sgd': a comparison takes its methods by methods="):
        compare(replace(request, method="sgd"), records)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_an_estimator_that_was_stopped_goes_on(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stated is what the ledger holds; what the first attempt may have released is paid for once more."""
    doors, book, told, rehearsed = Doors(task, tmp_path), tmp_path / "book.db", 0, FEW_STEPS
    usual = SGLD.tell

    def stopping(self: SGLD, *arguments: Any) -> Any:
        nonlocal told
        told += 1
        if told == rehearsed + 8:
            raise KeyboardInterrupt
        return usual(self, *arguments)

    monkeypatch.setattr(SGLD, "tell", stopping)
    options: dict[str, Any] = {"checkpoint": Checkpoints(tmp_path / "kept", every=5), "ledger": book, "seed": None}
    with pytest.raises(KeyboardInterrupt):
        doors.estimator(**options, hidden=(), name="d")
    model = doors.estimator(**options, hidden=(), name="d")
    assert told == rehearsed + 7 + 1 + rehearsed + 7  # from the fifth step, not from the first
    with Ledger(book) as ledger:
        assert set(merged(model.privacy_.events)) == set(merged(ledger.events("d")))
    steps = sum(event.count for event in model.privacy_.events if event.sampling == "poisson")
    assert 12 < steps <= 12 + 5


def test_a_count_is_not_paid_for_if_the_fit_could_not_be(tmp_path: Path) -> None:
    book = Ledger()
    book.limit(4.0, 1e-5)  # enough for the count, not for the fit
    with pytest.raises(BudgetExceeded):
        Doors("classification", tmp_path, records=None).python(ledger=book, seed=None)
    assert book.entries() == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chains": 0}, r"chains=0: must be a whole number, at least 1"),
        ({"sampling": "lottery"}, r"sampling='lottery': must be one of poisson"),
        ({"adjacency": "swap"}, r"adjacency='swap': must be one of add-remove"),
        ({"noise_scale": 0.0}, r"noise_scale=0.0: must be greater than 0"),
        ({"clip": float("inf")}, r"clip=inf: must be greater than 0"),
        ({"hidden": (10**6, 10**6)}, r"hidden=1000000,1000000: gives .* weights"),
        ({"method": "em"}, r"method='em': is not for classification; use one of "),
    ],
)
def test_refusals_name_the_argument_and_cost_nothing(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    book = Ledger()
    with pytest.raises(Refusal, match=message):
        Doors("classification", tmp_path).python(ledger=book, **changes)
    assert book.entries() == ()


def test_names_are_taken_with_hyphens_or_underscores(tmp_path: Path) -> None:
    assert confide.methods.get("mc_dropout") is confide.methods.get("mc-dropout")
    saved = Doors("classification", tmp_path).command("--method", "mc_dropout", "--set", "learning-rate=0.5")
    assert saved.record["method"]["name"] == "mc-dropout"
    assert saved.record["method"]["parameters"]["learning_rate"] == 0.5
