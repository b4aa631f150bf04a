"""Everything that confide offers can be saved, and loaded by a process that has imported nothing but the loader."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import confide
from confide import methods
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.expectation.mixture import MixtureOfGaussians
from confide.methods.base import Method, Problem
from confide.models import likelihoods, networks, priors
from confide.models.likelihoods import LIKELIHOODS, Categorical, Gaussian, LearntNoise, Likelihood
from confide.models.predictive import RealPredictive
from confide.posteriors.base import Posterior
from confide.posteriors.draws import Draws
from confide.posteriors.files import KINDS, load_posterior
from confide.privacy.ledger import Ledger
from confide.sources.queries import GradientQuery, Release

RECORDS, FEATURES = 30, 3

LOADER = """
import json, sys
from confide.posteriors.files import load_posterior
import torch
said = {}
for path in sys.argv[1:]:
    posterior = load_posterior(path)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    seen = posterior.summary(x)
    values = [seen.centre, seen.aleatoric, seen.epistemic, posterior.mean(), posterior.weighted_draws()[0][0]]
    about = [posterior.kind, posterior.likelihood.name, repr(posterior.likelihood), posterior.noise_scale]
    said[path] = [[value.double().flatten().tolist() for value in values], about, dict(posterior.facts)]
print(json.dumps(said))
"""


def said(posterior: Posterior) -> list[Any]:
    """The same words as the other process says."""
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    seen = posterior.summary(x)
    values = [seen.centre, seen.aleatoric, seen.epistemic, posterior.mean(), posterior.weighted_draws()[0][0]]
    about = [posterior.kind, posterior.likelihood.name, repr(posterior.likelihood), posterior.noise_scale]
    found = [[value.double().flatten().tolist() for value in values], about, dict(posterior.facts)]
    return list(json.loads(json.dumps(found)))


def data(task: str, ledger: Ledger | None = None) -> confide.PrivateData:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(RECORDS, FEATURES, generator=generator) * 2 - 1
    classes = {"binary": 2, "classification": 3}.get(task)
    y = x.sum(1) / 3 if classes is None else (x.sum(1) * 2).long().clamp(0, classes - 1)
    return confide.PrivateData(x, y, schema=Schema(classes=classes, records=RECORDS), ledger=ledger, seed=3)


@cache
def plan() -> confide.Plan:
    return confide.plan(epsilon=5, delta=1e-2, records=RECORDS, batch=10, steps=8)


def fitted(method: Method, module: nn.Module, task: str, likelihood: Likelihood | None = None) -> Posterior:
    return confide.fit(method, module, data(task), plan(), likelihood=likelihood, seed=0).posterior


def of_methods() -> dict[str, Posterior]:
    """Every method, for every task that it says it is for."""
    modules = {
        "classification": networks.mlp(FEATURES, 3, hidden=(4,)),
        "binary": networks.logistic(FEATURES),
        "regression": networks.mlp(FEATURES, 1, hidden=(4,)),
        "mixture": MixtureOfGaussians(2, FEATURES, scale=0.5, spread=0.7, generator=torch.Generator().manual_seed(0)),
    }
    pairs = [(cls, task) for cls in methods.all_methods().values() for task in cls.tasks]
    return {f"{cls.name}-{task}": fitted(cls(), modules[task], task) for cls, task in pairs}


def of_priors() -> dict[str, Posterior]:
    offered = [
        value for value in vars(priors).values() if isinstance(value, type) and value.__module__ == priors.__name__
    ]
    made = [value() for value in offered if value not in (priors.Prior, priors.Divergence)]
    assert len(made) >= 5, "the list of priors was not found"
    sgld, bbp = methods.get("sgld"), methods.get("bbp")
    network = networks.mlp(FEATURES, 3, hidden=(4,))
    found: dict[str, Posterior] = {}
    for prior in made:
        cls: Any = bbp if isinstance(prior, priors.LogUniformPrior) else sgld
        found[f"prior-{type(prior).__name__}"] = fitted(cls(prior=prior), network, "classification")
    return found


def of_likelihoods() -> dict[str, Posterior]:
    settings: dict[str, dict[str, Any]] = {
        "categorical": {"classes": 4},
        "calibrated": {"classes": 3, "slope": 0.8, "shifts": (0.1, -0.3, 0.2)},
        "gaussian": {"noise_scale": 0.37},
        "heteroscedastic-gaussian": {"smallest": 0.02},
        "tokens": {"classes": 4, "shifted": True, "length": 3.0},
        "poisson": {"mean": 2.5},
        "negative-binomial": {"mean": 2.5, "smallest": 0.1},
        "ordinal": {"classes": 4},
        "multi-label": {"labels": 3},
        "student-t": {"scale": 0.2, "freedom": 5.0},
        "laplace": {"scale": 0.2},
        "exponential": {"time": 3.0},
        "weibull": {"time": 3.0, "smallest": 0.2},
        "multi-gaussian": {"targets": 2, "noise_scale": 0.3},
    }
    found: dict[str, Posterior] = {}
    for name, cls in LIKELIHOODS.items():
        one = cls(**settings.get(name, {}))
        network = networks.mlp(FEATURES, one.outputs, hidden=(4,), activation="tanh").double()
        size = sum(p.numel() for p in network.parameters())
        draws = torch.randn(3, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        found[f"likelihood-{name}"] = Draws(network, one, draws, torch.full((3,), 1 / 3, dtype=torch.float64))
    return found


def of_networks() -> dict[str, Posterior]:
    likelihood = likelihoods.HeteroscedasticGaussian()
    noisy = LearntNoise(networks.mlp(FEATURES, 1, hidden=(4,)), 0.2)
    mixture = MixtureOfGaussians(2, FEATURES, scale=0.5, generator=torch.Generator().manual_seed(0))
    return {
        "learnt noise, draws": fitted(methods.get("sgld")(), noisy, "regression", likelihood),
        "learnt noise, bbp": fitted(methods.get("bbp")(), noisy, "regression", likelihood),
        "mixture, draws": Draws(mixture, Categorical(2), torch.randn(2, 6).double(), torch.full((2,), 0.5).double()),
        "linear dropout": fitted(methods.get("mc-dropout")(), networks.softmax(FEATURES, 3), "classification"),
    }


def test_a_mixture_keeps_its_type(tmp_path: Path) -> None:
    """Doubles would not go onto a device that has none."""
    mixture = MixtureOfGaussians(2, FEATURES, scale=0.5, generator=torch.Generator().manual_seed(0)).float()
    Draws(mixture, Categorical(2), torch.randn(2, 6), torch.full((2,), 0.5)).save(tmp_path / "m.safetensors")
    again = confide.load_posterior(tmp_path / "m.safetensors").module
    assert {value.dtype for value in again.state_dict().values()} == {torch.float32}


def test_everything_is_loaded_by_a_fresh_process(tmp_path: Path) -> None:
    everything = {**of_methods(), **of_priors(), **of_likelihoods(), **of_networks()}
    assert {posterior.kind for posterior in everything.values()} == {kind.kind for kind in KINDS}
    paths = {}
    for number, (name, posterior) in enumerate(everything.items()):
        assert isinstance(posterior, Posterior)
        paths[name] = str(tmp_path / f"{number}.safetensors")
        posterior.save(paths[name])
    done = subprocess.run([sys.executable, "-c", LOADER, *paths.values()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, path in paths.items():
        assert found[path] == said(everything[name]), name


def draws_of(module: nn.Module, likelihood: Any, **facts: Any) -> Draws:
    size = sum(p.numel() for p in module.parameters() if p.requires_grad)
    draws = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    return Draws(module, likelihood, draws, torch.full((3,), 1 / 3), facts)


class TestNetworks:
    """A recipe in a file is believed, so a network that it does not make must not leave one there."""

    def frozen(self) -> nn.Module:
        network = networks.mlp(FEATURES, 3, hidden=(4,))
        network[0].requires_grad_(False)
        return network

    def exchanged(self) -> nn.Module:
        network = networks.mlp(FEATURES, 3, hidden=(4,))
        network[1] = nn.Sigmoid()
        return network

    def derived(self) -> nn.Module:
        class Doubled(networks.MLP):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * super().forward(x)

        return Doubled(networks.Recipe(FEATURES, 3, (4,)))

    def own(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, 3))

    @pytest.mark.parametrize("make", ["frozen", "exchanged", "derived", "own"])
    def test_what_its_recipe_does_not_make_is_given_again(self, make: str, tmp_path: Path) -> None:
        network = getattr(self, make)()
        posterior = draws_of(network, Categorical(3))
        posterior.save(tmp_path / "p.safetensors")
        with pytest.raises(Refusal, match="pass it as module="):
            load_posterior(tmp_path / "p.safetensors")
        assert said(load_posterior(tmp_path / "p.safetensors", network)) == said(posterior)

    def test_another_network_is_refused(self, tmp_path: Path) -> None:
        draws_of(self.own(), Categorical(3)).save(tmp_path / "p.safetensors")
        with pytest.raises(Refusal, match="has 12 trainable parameters, and this posterior's network has 31"):
            load_posterior(tmp_path / "p.safetensors", networks.softmax(FEATURES, 3))

    def test_saving_draws_nothing_from_the_users_stream(self, tmp_path: Path) -> None:
        posterior = draws_of(networks.mlp(FEATURES, 3), Categorical(3))
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        posterior.save(tmp_path / "p.safetensors")
        assert torch.equal(torch.rand(3), expected)


@dataclass(frozen=True)
class Absolute:
    """A Laplace law of the target: a likelihood of one's own."""

    scale: Any = 0.3
    name: ClassVar[str] = "absolute"
    outputs: ClassVar[int] = 1
    curvature: ClassVar[float] = 1.0

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return (output.reshape(y.shape) - y).abs() / self.scale

    def predictive(self, outputs: Tensor, weights: Tensor) -> RealPredictive:
        means = outputs[..., 0]
        return RealPredictive(means, torch.full_like(means, 2 * self.scale**2), weights)


class Impostor(Absolute):
    """A likelihood of one's own that carries the name of one of confide's."""

    name: ClassVar[str] = "gaussian"


class TestLikelihoods:
    @pytest.mark.parametrize("one", [Absolute(), Impostor(), Absolute(scale=torch.tensor(0.3))])
    def test_one_of_ones_own_is_given_again(self, one: Any, tmp_path: Path) -> None:
        posterior = fitted(methods.get("sgld")(), networks.mlp(FEATURES, 1, hidden=(4,)), "regression", one)
        posterior.save(tmp_path / "p.safetensors")
        with pytest.raises(Refusal, match="pass it as likelihood="):
            load_posterior(tmp_path / "p.safetensors")
        assert said(load_posterior(tmp_path / "p.safetensors", likelihood=one)) == said(posterior)
        with pytest.raises(Refusal, match="was fitted with"):
            load_posterior(tmp_path / "p.safetensors", likelihood=Categorical(3))

    @pytest.mark.parametrize("part", ["name", "outputs", "curvature", "predictive"])
    def test_an_incomplete_one_is_refused_before_the_charge(self, part: str) -> None:
        whole = {name: value for name, value in vars(Absolute).items() if not name.startswith("__")}
        likelihood: Any = type("Incomplete", (), {name: value for name, value in whole.items() if name != part})()
        ledger = Ledger()
        with pytest.raises(Refusal, match=f"has no {part}"):
            confide.fit(
                methods.get("sgd")(),
                networks.linear(FEATURES),
                data("regression", ledger),
                plan(),
                likelihood=likelihood,
            )
        assert not ledger.entries()

    def test_a_class_is_no_likelihood(self) -> None:
        with pytest.raises(Refusal, match="is a class"):
            fitted(methods.get("sgd")(), networks.linear(FEATURES), "regression", Gaussian)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Centre:
    """A posterior of one's own, as small as can be: everything that files need."""

    module: nn.Module
    likelihood: Likelihood
    point: Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "centre"

    def save(self, path: str | Path) -> None:
        from confide.posteriors.description import save_posterior

        save_posterior(self, {"point": self.point}, path)  # type: ignore[arg-type]

    @classmethod
    def rebuilt(cls, module: nn.Module, likelihood: Likelihood, tensors: Mapping[str, Tensor], facts: Any) -> Centre:
        return cls(module, likelihood, tensors["point"], facts)


class Bare:
    """Another one, which cannot be written down."""

    def __init__(self, point: Tensor) -> None:
        self.point = point


@dataclass(frozen=True)
class Standing(Method):
    name: ClassVar[str] = "standing"

    def init(self, problem: Problem) -> None:
        return None

    def ask(self, problem: Problem, state: None) -> GradientQuery:
        return problem.gradient_query

    def tell(self, problem: Problem, state: None, release: Release) -> None:
        return None

    def posterior(self, problem: Problem, state: None) -> Any:
        return Centre(problem.module, problem.likelihood, problem.position.clone(), {"odd": {1, 2}, "t": torch.ones(2)})


class TestPosteriors:
    def test_one_of_ones_own_is_loaded_by_its_class(self, tmp_path: Path) -> None:
        posterior = fitted(Standing(), networks.softmax(FEATURES, 3), "classification")
        posterior.save(tmp_path / "p.safetensors")
        with pytest.raises(Refusal, match="pass its class as kind="):
            load_posterior(tmp_path / "p.safetensors")
        again: Any = load_posterior(tmp_path / "p.safetensors", kind=Centre)  # type: ignore[arg-type]
        assert torch.equal(again.point, torch.zeros(12))
        assert again.facts == {"odd": [1, 2], "t": [1.0, 1.0]}, "no fact may cost a paid posterior"

    def test_one_that_could_not_be_saved_is_refused_before_the_charge(self) -> None:
        class Careless(Standing):
            def posterior(self, problem: Problem, state: None) -> Bare:  # type: ignore[override]
                return Bare(problem.position)

        ledger = Ledger()
        with pytest.raises(Refusal, match="Bare, has no kind, save, rebuilt"):
            confide.fit(Careless(), networks.softmax(FEATURES, 3), data("classification", ledger), plan())
        assert not ledger.entries()


@pytest.mark.parametrize("fault", ["tensor", "shape", "likelihood", "network", "kind", "facts", "not json"])
def test_a_damaged_file_is_refused_in_one_sentence(fault: str, tmp_path: Path) -> None:
    draws_of(networks.mlp(FEATURES, 3), Categorical(3)).save(tmp_path / "p.safetensors")
    tensors = load_file(tmp_path / "p.safetensors")
    about: Any = {
        "kind": "draws",
        "likelihood": {"name": "categorical", "classes": 3},
        "network": {"type": "mlp", "recipe": networks.Recipe(FEATURES, 3, (64,)).to_dict(), "numbers": "float32"},
        "facts": {},
    }
    if fault == "tensor":
        del tensors["draws"]
    elif fault == "shape":
        tensors["draws"] = tensors["draws"][0].clone()
    elif fault in ("likelihood", "network", "facts"):
        about[fault] = 7
    elif fault == "kind":
        about["kind"] = ["draws"]
    text = "{" if fault == "not json" else json.dumps(about)
    save_file(tensors, tmp_path / "q.safetensors", metadata={"confide": text})
    with pytest.raises(Refusal, match=r"q\.safetensors"):
        load_posterior(tmp_path / "q.safetensors")
