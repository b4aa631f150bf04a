"""What could not be used after it was paid for is refused before the charge: the ledger stays empty."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import confide
from confide import methods
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.methods.base import Method
from confide.methods.sgld import SGLD
from confide.models import networks
from confide.models.likelihoods import Categorical, Gaussian
from confide.models.predictive import RealPredictive
from confide.models.priors import GaussianPrior
from confide.posteriors.files import load_posterior
from confide.privacy.ledger import Ledger
from confide.running import dress_rehearsal

RECORDS, FEATURES = 40, 3
PLAN = {"noise_multiplier": 1.0, "delta": 1e-3, "records": RECORDS, "batch": 10, "steps": 6}


def fitted(module: nn.Module, likelihood: Any = None, method: Method | None = None, **given: Any) -> confide.Run:
    x = torch.rand(RECORDS, FEATURES, generator=torch.Generator().manual_seed(0)) * 2 - 1
    data = confide.PrivateData(
        given.get("x", x), given.get("y", x.sum(1)), schema=given.get("schema", Schema()), ledger=given.get("ledger")
    )
    return confide.fit(method or SGLD(), module, data, confide.plan(**PLAN), likelihood=likelihood, seed=0)


def refused(match: str, module: nn.Module, likelihood: Any = None, method: Method | None = None, **given: Any) -> None:
    ledger = Ledger()
    with pytest.raises(Refusal, match=match):
        fitted(module, likelihood, method, ledger=ledger, **given)
    assert not ledger.entries(), "nothing may be charged for what cannot be used"


@dataclass(frozen=True)
class Own:
    """A likelihood of one's own that does what it should."""

    scale: float = 0.3
    name: ClassVar[str] = "own"
    outputs: ClassVar[int] = 1
    curvature: ClassVar[float] = 1.0

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return (output.reshape(y.shape) - y).square() / self.scale

    def predictive(self, outputs: Tensor, weights: Tensor) -> Any:
        means = outputs[..., 0]
        return RealPredictive(means, torch.full_like(means, self.scale), weights)


class Tensors(Own):
    """Gives a tensor in place of a predictive distribution."""

    def predictive(self, outputs: Tensor, weights: Tensor) -> Any:
        return outputs.mean(0)


class Raises(Own):
    def predictive(self, outputs: Tensor, weights: Tensor) -> Any:
        raise KeyError("temperature")


class OneNumber(Own):
    """One number for all inputs."""

    def predictive(self, outputs: Tensor, weights: Tensor) -> Any:
        return RealPredictive(outputs.mean((1, 2))[:, None], torch.ones(len(outputs), 1), weights)


class TestLikelihoods:
    @pytest.mark.parametrize("one", [Tensors(), Raises(), OneNumber()])
    @pytest.mark.parametrize("method", ["sgld", "bbp", "sgd"])
    def test_one_that_cannot_predict_is_refused(self, one: Any, method: str) -> None:
        refused("could not predict", networks.linear(FEATURES), one, methods.get(method)())

    def test_one_whose_outputs_are_not_the_networks_is_refused(self) -> None:
        class Two(Own):
            def predictive(self, outputs: Tensor, weights: Tensor) -> Any:
                return RealPredictive(outputs[..., 0], outputs[..., 1].exp(), weights)

        refused("could not predict", networks.linear(FEATURES), Two())

    def test_a_lambda_as_loss_works(self, tmp_path: Path) -> None:
        class Local(Own):
            def __init__(self) -> None:
                object.__setattr__(self, "distance", lambda a, b: (a - b).square())

            def loss(self, output: Tensor, y: Tensor) -> Tensor:
                return self.distance(output.reshape(y.shape), y)  # type: ignore[attr-defined, no-any-return]

        run = fitted(networks.linear(FEATURES), Local())
        run.save(str(tmp_path / "run"))
        path = tmp_path / "run" / "posterior.safetensors"
        with pytest.raises(Refusal, match="pass it as likelihood="):
            load_posterior(path)
        assert torch.equal(load_posterior(path, likelihood=Local()).mean(), run.posterior.mean())


class EvalFails(nn.Linear):
    """A network that was only ever tried while it learns."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise NotImplementedError("eval")
        return super().forward(x)


class TwoInTraining(nn.Linear):
    """Gives a tuple after training, as networks with auxiliary heads do the other way round."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return found if self.training else (found, x)


class Outside(nn.Module):
    """Keeps something that no file holds, and forgets it when it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.register_buffer("unused", torch.zeros(1))
        self.shift = 0.0

    def __deepcopy__(self, memo: Any) -> Outside:
        made = Outside()
        made.layer.load_state_dict(self.layer.state_dict())
        made.shift = self.shift + 1.0
        return made

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift  # type: ignore[no-any-return]


class RandomFeatures(nn.Module):
    """Frozen random features and a buffer: a network built anew has others."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, 8)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.randn(8))
        self.loose = torch.randn(8)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.frozen(x) * self.loose + self.shift)))  # type: ignore[no-any-return]


class KeptForLater(nn.Module):
    """As libraries keep tables of positions: made by the first forward, in a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("scale", torch.rand(1) + 0.5, persistent=False)
        self.last = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.register_buffer("table", torch.linspace(0, 1, x.shape[1]), persistent=False)
        return self.last(x * self.scale + self.table[: x.shape[1]])  # type: ignore[no-any-return, index]


class TestNetworks:
    @pytest.mark.parametrize("make", [EvalFails, TwoInTraining])
    def test_one_that_works_in_training_alone_is_refused(self, make: Any) -> None:
        refused("could not predict", make(FEATURES, 1))

    def test_one_that_another_copy_does_not_resemble_is_refused(self) -> None:
        refused("predicts something else after it was saved", Outside())

    @pytest.mark.parametrize("method", ["sgld", "bbp", "mc-dropout", "sgd"])
    def test_frozen_values_are_in_the_file(self, method: str, tmp_path: Path) -> None:
        x = torch.rand(5, FEATURES)
        run = fitted(RandomFeatures(), method=methods.get(method)())
        run.save(str(tmp_path / "run"))
        other = RandomFeatures()
        before = other.frozen.weight.clone()
        loaded = load_posterior(tmp_path / "run" / "posterior.safetensors", other)
        assert torch.allclose(loaded.summary(x).centre, run.posterior.summary(x).centre)
        assert torch.equal(other.frozen.weight, before), "the network that was given stays as it is"

    def test_frozen_values_of_another_shape_are_refused(self, tmp_path: Path) -> None:
        fitted(RandomFeatures()).posterior.save(tmp_path / "p")
        other = RandomFeatures()
        other.shift = torch.zeros(1)
        with pytest.raises(Refusal, match="have other shapes"):
            load_posterior(tmp_path / "p", other)

    def test_what_a_forward_keeps_for_later_need_not_be_there(self, tmp_path: Path) -> None:
        """A posterior of a network that had been called was refused by a fresh one; drawn values come back."""
        x, used = torch.rand(5, FEATURES), KeptForLater()
        used(x)
        run = fitted(used)
        run.posterior.save(tmp_path / "p")
        loaded = load_posterior(tmp_path / "p", KeptForLater())
        assert torch.allclose(loaded.summary(x).centre, run.posterior.summary(x).centre)

    def test_a_token_model_predicts(self) -> None:
        class Tokens(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table, self.drop, self.last = nn.Embedding(11, 4), nn.Dropout(0.2), nn.Linear(4, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.last(self.drop(self.table(x).mean(1)))  # type: ignore[no-any-return]

        x = torch.randint(0, 11, (RECORDS, 5), generator=torch.Generator().manual_seed(0))
        for method in ("sgld", "mc-dropout"):
            run = fitted(Tokens(), x=x, y=x[:, 0] % 2, schema=Schema(classes=2), method=methods.get(method)())
            assert run.posterior.summary(x[:4]).centre.shape == (4, 2)


class Unwritable:
    """A prior's scale that does not even say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


@dataclass(frozen=True)
class OddPrior(GaussianPrior):
    odd: Any = field(default_factory=Unwritable)


@dataclass(frozen=True)
class OddFacts(SGLD):
    """Facts with keys that JSON does not know."""

    name: ClassVar[str] = "odd-facts"

    def posterior(self, problem: Any, state: Any) -> Any:
        from dataclasses import replace

        found = super().posterior(problem, state)
        facts: Mapping[Any, Any] = {**found.facts, (1, 2): 3}
        return replace(found, facts=facts)


@dataclass(frozen=True)
class NeedsAll(SGLD):
    """A method of one's own that cannot do with fewer steps than it was planned for."""

    name: ClassVar[str] = "needs-all"

    def posterior(self, problem: Any, state: Any) -> Any:
        if state.step < 5:
            raise ValueError("too few steps")
        return super().posterior(problem, state)


class TestMethods:
    def test_a_prior_that_cannot_be_written_down_is_refused(self) -> None:
        refused("could not be written down", networks.linear(FEATURES), method=SGLD(prior=OddPrior()))

    def test_facts_that_cannot_be_written_down_are_refused(self) -> None:
        refused("could not save its posterior", networks.linear(FEATURES), method=OddFacts())

    def test_a_method_that_needs_all_of_its_steps_is_not_refused(self) -> None:
        assert fitted(networks.linear(FEATURES), method=NeedsAll()).posterior is not None

    def test_a_rehearsal_moves_nobodys_stream(self) -> None:
        network = networks.mlp(FEATURES, 1)
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        fitted(network, Gaussian(0.2))
        assert torch.equal(torch.rand(2), expected)


MAIN = """
import sys, torch
from torch import nn
import confide
from confide.data.schema import Schema
from confide.methods.sgld import SGLD
from confide.posteriors.files import load_posterior

def network():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act = nn.Linear(3, 3), (lambda x: x * torch.sigmoid(x))
        def forward(self, x, scale=1.0, *rest, **named):
            return self.act(self.layer(x)) * scale
    return Local()

class Likelihood:
    name, outputs, curvature = "mine", 3, 1.0
    def loss(self, output, y):
        return nn.functional.cross_entropy(output, y, reduction="none")
    def predictive(self, outputs, weights):
        return confide.predictive.ClassPredictive(outputs.softmax(-1), weights)

x = torch.linspace(-1, 1, 120).reshape(40, 3)
if sys.argv[1] == "fit":
    data = confide.PrivateData(x, (x.sum(1) > 0).long(), schema=Schema(classes=3))
    plan = confide.plan(noise_multiplier=1.0, delta=1e-3, records=40, batch=10, steps=6)
    run = confide.fit(SGLD(), network(), data, plan, likelihood=Likelihood())
    run.posterior.save(sys.argv[2])
    found = run.posterior
else:
    found = load_posterior(sys.argv[2], network(), likelihood=Likelihood())
print(found.summary(x).centre.sum(0).tolist())
"""


def test_what_is_defined_in_a_script_is_loaded_by_another_run_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MAIN.replace("confide.predictive.", "confide.models.predictive."))
    said = [
        subprocess.run(
            [sys.executable, str(script), step, str(tmp_path / "p")], capture_output=True, text=True, timeout=120
        )
        for step in ("fit", "load")
    ]
    assert [one.returncode for one in said] == [0, 0], said[0].stderr + said[1].stderr
    assert said[0].stdout == said[1].stdout


def test_what_is_defined_in_a_notebook_is_loaded() -> None:
    """Names that live in a namespace without a module, as those of a notebook's cells do."""
    cells: dict[str, Any] = {"__name__": "__main__", "fitted": fitted, "nn": nn, "load": load_posterior}
    exec(
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.layer = nn.Linear(3, 1)\n"
        "    def forward(self, x):\n        return self.layer(x)\n"
        "run = fitted(Net())\n",
        cells,
    )
    assert cells["run"].posterior.mean().shape == (4,)


def test_it_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether made-up records round alike in every place is nobody's matter here: asked, it took nine rehearsals."""
    gone, used = [], dress_rehearsal._used

    def counted(*given: Any) -> None:
        gone.append(given)
        used(*given)

    monkeypatch.setattr(dress_rehearsal, "_used", counted)
    fitted(networks.linear(FEATURES))
    fitted(networks.linear(FEATURES), method=methods.get("bbp")())
    assert len(gone) == 2


def test_classes_are_known_by_their_schema() -> None:
    refused(
        "outputs|labels", networks.linear(FEATURES), Categorical(3), schema=Schema(classes=3), y=torch.zeros(RECORDS)
    )
