"""The skeletons of docs/skeletons work as they stand: each goes where a contribution of its kind would go."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import confide
from confide import methods, papers
from confide.cli.app import main
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.reference import reference_clipped_sum
from confide.mechanism.clipping.rules.registry import find_rule
from confide.models import networks
from confide.models.likelihoods import Likelihood
from confide.privacy.accountants import PLD
from confide.privacy.events import GaussianEvent, NonPrivateEvent, PureEvent
from tests.conformance import test_methods as conformance
from tests.conformance.conftest import classification

FOLDER = Path(__file__).parents[2] / "docs" / "skeletons"
NAMES = {"accountant", "layer_rule", "likelihood", "method", "paper"}


def skeleton(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"skeleton_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names of their annotations
    spec.loader.exec_module(module)
    return module


def test_every_skeleton_is_tested_and_named_in_the_guide() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == NAMES
    guide = (FOLDER.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"docs/skeletons/{name}.py" in guide


@pytest.fixture
def in_package(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """A skeleton copied into its package, as its docstring says; gone again afterwards."""
    package, name = request.param
    shutil.copy(FOLDER / f"{name}.py", tmp_path / f"copied_{name}.py")
    listing = methods.all_methods if package is methods else papers.all_papers
    package.__path__.append(str(tmp_path))
    listing.cache_clear()
    yield
    package.__path__.remove(str(tmp_path))
    sys.modules.pop(f"{package.__name__}.copied_{name}", None)
    listing.cache_clear()


def conformance_tests() -> list[str]:
    return [name for name, value in vars(conformance).items() if name.startswith("test_") and "name" in _wanted(value)]


def _wanted(function: Any) -> tuple[str, ...]:
    return tuple(function.__code__.co_varnames[: function.__code__.co_argcount])


@pytest.mark.parametrize("in_package", [(methods, "method")], indirect=True)
@pytest.mark.usefixtures("in_package")
class TestMethod:
    def test_it_is_found_and_fits(self) -> None:
        assert "averaging" in methods.names()
        case = classification()
        plan = confide.plan(epsilon=3, delta=1e-3, records=60, batch=20, steps=10)
        run = confide.fit(methods.get("averaging")(), case.module, case.data(), plan, seed=0)
        assert run.posterior.facts["point_estimate"]
        with pytest.raises(Refusal, match="learning_rate=0"):
            methods.Averaging(learning_rate=0)

    @pytest.mark.parametrize("test", conformance_tests())
    def test_it_conforms(self, test: str, tmp_path: Path) -> None:
        function = getattr(conformance, test)
        given = {"name": "averaging", "case": classification(), "tmp_path": tmp_path}
        function(**{name: given[name] for name in _wanted(function)})


def test_the_conformance_suite_is_what_is_run() -> None:
    assert len(conformance_tests()) >= 8


class TestLayerRule:
    def test_against_one_by_one_gradients(self) -> None:
        scale = skeleton("layer_rule").Scale
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 5), scale(5), nn.Tanh(), nn.Linear(5, 3))
        assert find_rule(network[1], frozenset({"factor"})) is not None, (
            "without a rule it would be replayed, and nothing would be tested"
        )
        self.compare(network, 3)

    def test_a_wrong_rule_is_found_out_on_made_up_records(self) -> None:
        """The planted fault: the engine compares rules with plain gradients once, and then does without this one."""
        module, calls = skeleton("layer_rule"), []

        class Other(module.Scale):  # type: ignore[name-defined,misc]
            forward = module.Scale.forward

        @module.rule_for(Other)  # type: ignore[untyped-decorator]
        def wrong(call: Any) -> dict[str, torch.Tensor]:
            calls.append(call.records)
            return {"factor": call.gradient}

        self.compare(nn.Sequential(nn.Linear(4, 5), Other(5)), 5)
        assert calls
        assert 9 not in calls, "it never served the batch"

    def compare(self, network: nn.Module, classes: int) -> None:
        x, y = torch.randn(9, 4), torch.randint(0, 3, (9,))
        loss = confide.likelihoods.Categorical(classes).loss
        size = sum(p.numel() for p in network.parameters())
        found, wanted = torch.zeros(size), torch.zeros(size)
        clipped_sum(network, loss, x, y, clip=0.3, out=found)
        reference_clipped_sum(network, loss, x, y, clip=0.3, out=wanted)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class TestAccountant:
    @pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
    @pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 1.0, 1), (2.0, 1.0, 10), (1.0, 0.1, 5)])
    def test_it_is_above_pld(self, adjacency: Any, noise: float, rate: float, steps: int) -> None:
        accountant = skeleton("accountant").BasicComposition()
        events = [GaussianEvent(noise, "full-batch" if rate == 1 else "poisson", rate, steps)]
        found, tight = (one.epsilon(events, 1e-5, adjacency) for one in (accountant, PLD()))
        assert found.sound
        assert found.epsilon >= tight.epsilon * (1 - 1e-9)
        if (rate, steps) == (1.0, 1):
            assert found.epsilon == pytest.approx(tight.epsilon, rel=1e-3), "one Gaussian release is exact"

    def test_what_it_cannot_price_it_does_not(self) -> None:
        accountant = skeleton("accountant").BasicComposition()
        assert accountant.epsilon([PureEvent(0.5)], 1e-5).epsilon is None
        assert accountant.epsilon([NonPrivateEvent("a plot")], 1e-5).epsilon == float("inf")


class TestLikelihood:
    def test_fit_predict_save_and_load(self, tmp_path: Path) -> None:
        counts = skeleton("likelihood").Counts()
        assert isinstance(counts, Likelihood)
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(400, 2, generator=generator) * 2 - 1
        y = torch.poisson(torch.exp(1 + x[:, 0]), generator=generator)
        data = confide.PrivateData(x, y, schema=Schema(records=400), seed=1)
        plan = confide.plan(epsilon=8, delta=1e-3, records=400, batch=100, steps=150, clip=5.0)
        run = confide.fit(methods.get("sgd")(), networks.linear(2), data, plan, likelihood=counts, seed=0)
        far = run.posterior.predict(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
        assert float(far.mean[1]) > 1.5 * float(far.mean[0]), "the rate of counts grows with the first feature"
        run.posterior.save(tmp_path / "p.safetensors")
        with pytest.raises(Refusal, match="pass it as likelihood="):
            confide.load_posterior(tmp_path / "p.safetensors")
        again = confide.load_posterior(tmp_path / "p.safetensors", likelihood=counts)
        assert torch.equal(again.mean(), run.posterior.mean())


@pytest.mark.parametrize("in_package", [(papers, "paper")], indirect=True)
@pytest.mark.usefixtures("in_package")
def test_a_paper_is_listed_and_run_by_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["papers", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["papers"]["skeleton"]["experiments"] == {
        "accuracy": "Table 1: accuracy at one epsilon"
    }
    copied = str(tmp_path / "copied_paper.py")
    assert main(["papers", "run", "--from", copied, "--quick", "--json", "--out", str(tmp_path / "out")]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["ours"] > 0.5
    assert 0 < row["epsilon"] <= 1.0
    assert row["kind"] == "upper bound"
