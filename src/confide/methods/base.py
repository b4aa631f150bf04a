"""What every method is: a frozen set of public hyper-parameters and four functions.

    init       the state before any data
    ask        what the method wants to know of one record, given its state
    tell       the next state, given a release: post-processing, free of cost
    posterior  what was learnt

No function takes data. A method never learns which records exist, only the noisy sums that the boundary released.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.errors import Refusal
from confide.layers.programs import ScoutedProgram, WhitenedProgram, program_of
from confide.mechanism.plan import Plan
from confide.models.likelihoods import Likelihood
from confide.models.priors import GaussianPrior, Prior
from confide.models.programs import Program, ProgramLikelihood, ProgramPrior
from confide.posteriors.base import Posterior
from confide.sources.queries import GradientQuery, Query, Release


@dataclass(frozen=True)
class Problem:
    """The public side of a fit: everything that a method may know.

    module      a private copy of the user's network; its trainable parameters are views of `position`
    position    the flat parameter vector; writing to it moves the network. Never in less than single precision
    rounded     what the network of a half-precision type sees of it: the position rounded, anew at every question. None
                for any other network, whose parameters are the position itself
    likelihood  how outputs explain targets
    plan        declared sizes, steps, clip and noise
    generator   the method's own randomness (Langevin noise, weight draws, masks): no privacy rests on it
    """

    module: nn.Module
    position: Tensor
    likelihood: Likelihood
    plan: Plan
    generator: torch.Generator
    rounded: Tensor | None = None

    def settle(self) -> None:
        """Show the network where the position is. Under autocast torch keeps the weights as it has cast them once."""
        torch.clear_autocast_cache()
        if self.rounded is not None:
            self.rounded.copy_(self.position)

    @property
    def records(self) -> int:
        return self.plan.records

    @property
    def curvature(self) -> float:
        """Of the loss in an output; step sizes that follow from a public rule are divided by it."""
        return max(1.0, self.likelihood.curvature)

    @property
    def measured(self) -> bool:
        """Whether that curvature is of this very model, with room for what its prior holds for possible."""
        return isinstance(self.likelihood, ProgramLikelihood)

    def prior(self, own: Prior) -> Prior:
        """That of the method, or the one that a program brings along."""
        program = program_of(self.module)
        if program is None:
            return own
        if own != GaussianPrior():
            raise Refusal(f"prior={own!r}: the program has priors of its own; leave the method's out")
        return ProgramPrior(program)

    @cached_property
    def gradient_query(self) -> GradientQuery:
        """The gradient of the negative log-likelihood at the current position."""
        return GradientQuery(self.module, self.likelihood.loss)

    @cached_property
    def _whitened(self) -> dict[float, WhitenedProgram]:
        return {}

    def whitened(self, share: float) -> WhitenedProgram:
        """A program in axes that a method chooses, which asks for so much of its information."""
        assert isinstance(self.module, Program)
        if share not in self._whitened:
            self._whitened[share] = WhitenedProgram(self.module, share)
        return self._whitened[share]

    @cached_property
    def _scouted(self) -> dict[int, ScoutedProgram]:
        return {}

    def scouted(self, count: int) -> ScoutedProgram:
        """So many vectors of a program at once, which a method chooses."""
        assert isinstance(self.module, Program)
        if count not in self._scouted:
            self._scouted[count] = ScoutedProgram(self.module, count)
        return self._scouted[count]


@dataclass(frozen=True)
class Opening:
    """What a method asks of all records before it goes on with batches, where nothing was said about them.

    releases   about all records
    share      of epsilon that they may cost
    batches    of one pass over the records afterwards
    epochs     passes afterwards
    """

    releases: int
    share: float
    batches: int
    epochs: float


@dataclass(frozen=True)
class Method(ABC):
    """The base of every method: a frozen dataclass of settings that derives from it; docs/skeletons/method.py to copy.

    Four functions must be written. The others are traits, each with a default that says "nothing special".

    What `tell` returns is the state of the run, together with `problem.position`, which it moves in place: a network's
    parameters are its views, so that no step copies them. A checkpoint keeps both.

    name    the method's name on the command line; a class without one is a base of others and is not listed
    tasks   what it can learn, in the words of the command line; the first one that an audit knows is audited
    may_stop   whether `posterior` means what it says after any step, so that a run may end before its last one
    follows_clip   whether it may have another clip at every step: one that asks for gradients and takes its noise from
               the release; a method whose units are those of the first clip may not
    noise_in_width   whether the width of its posterior counts the noise of the releases; stands among the facts
    on_host    whether it computes on the host, in double precision, wherever the module is: for methods whose state is
               not the network's own vector; predictions are made where the module is all the same
    """

    name: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]] = ("classification", "binary", "regression")
    may_stop: ClassVar[bool] = False
    on_host: ClassVar[bool] = False
    noise_in_width: ClassVar[str] = "not counted"
    follows_clip: ClassVar[bool] = False

    @abstractmethod
    def init(self, problem: Problem) -> Any:
        """The state before any data."""

    @abstractmethod
    def ask(self, problem: Problem, state: Any) -> Query:
        """What is asked of one record at this step."""

    @abstractmethod
    def tell(self, problem: Problem, state: Any, release: Release) -> Any:
        """The next state."""

    @abstractmethod
    def posterior(self, problem: Problem, state: Any) -> Posterior:
        """The result after the last step."""

    def later(self, problem: Problem, state: Any) -> tuple[Any, ...]:
        """States that ask another kind of question than this first one, which are rehearsed before the charge too."""
        return ()

    def steps_apart(self, problem: Problem, state: Any) -> int:
        """How many steps from this state on the parties of a federation may make before they hear of each other.

        A party tells itself its own answers meanwhile, so that what it asks of a record next must mean the same to the
        server, who is told the answers of all. 1: no step beyond the one that is asked.
        """
        return 1

    def shapes_of_state(self, problem: Problem, start: Any) -> dict[str, tuple[tuple[int, ...] | None, ...]]:
        """The shapes that a tensor of the state may have in this run, by its field; None: it may be missing.

        A party of a federation is told the state by a server that it does not trust. Numbers may be any; an axis more,
        as long as a batch is, would tell records apart by their places, and one record more or less would move all.

        start   what `init` gave; the tensors that it has, in the shapes that they have there, unless a method says more
        """
        return {name: (tuple(value.shape),) for name, value in vars(start).items() if isinstance(value, Tensor)}

    def prepare(self, module: nn.Module) -> nn.Module:
        """The network that is trained: given a copy of the user's own, before anything else happens.

        A method that puts a distribution in place of every weight, say, gives back another network here.
        """
        return module

    def draws_of(self, steps: int) -> int | None:
        """How many draws a run of so many steps keeps; None for a method that is no sampler, so has no chains."""
        return None

    @property
    def releases(self) -> int | None:
        """Releases of a run, each about all records, where nothing was said about batches and steps.

        None: sampled batches by the public rule, which most methods want.
        """
        return None

    @property
    def opening(self) -> Opening | None:
        """Releases about all records before those of sampled batches, a block of their own in the plan.

        None: there are none.
        """
        return None

    def network(self, schema: Schema, inputs: int, outputs: int) -> nn.Module | None:
        """A network of the method's own for records with these public facts; None: the public rule's."""
        return None

    @property
    def recalibrates(self) -> bool:
        """Whether class probabilities are set right after the fit, by one release within its epsilon."""
        return False

    @property
    def learns_noise(self) -> bool:
        """Whether the noise of a Gaussian target is learnt by the method itself, within its own releases."""
        return False

    def with_given_noise(self) -> Method:
        """The same method, which keeps to the noise scale of the likelihood instead of learning it."""
        return self


def check_method(method: object) -> None:
    """Refuse what is no method, in one sentence."""
    if not isinstance(method, Method):
        raise TypeError(
            f"method={method!r}: must be a method, such as confide.methods.SGLD(); one of your own derives from "
            "confide.methods.Method"
        )
