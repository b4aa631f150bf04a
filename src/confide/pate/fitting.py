"""The walk of one PATE run: choose what to ask, pay for all of it, poll the teachers, teach the student."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from confide.devices.default import default_aside
from confide.errors import Refusal
from confide.mechanism.vote_costs import estimated_epsilon
from confide.mechanism.votes import ONE_VOTE, UNANSWERED, Teacher, VotesAnswers
from confide.pate.planning import PatePlan
from confide.pate.students import Student, Supervised
from confide.posteriors.base import Posterior
from confide.privacy.statement import Privacy
from confide.sources.private_data import PrivateData

REHEARSED = 32
"""Inputs of a rehearsal: enough for a graph and few enough to take no time."""
PUBLIC = "the inputs that the teachers were asked about are public"


@dataclass(frozen=True)
class PateRun:
    """The student's posterior, what was released to teach it, and what that cost."""

    posterior: Posterior
    privacy: Privacy
    plan: PatePlan
    asked: Tensor
    answers: VotesAnswers

    @property
    def estimated_epsilon(self) -> float | None:
        """What the votes and the estimate itself cost on these records: an estimate and no bound; None: not released.

        Tests for confidence are counted whatever the votes.
        """
        made = self.plan.mechanism
        if made.estimate is None or self.answers.cost is None:
            return None
        order = made.estimate.order
        tests = 0.0 if made.test_noise is None else made.queries * order * ONE_VOTE**2 / (2 * made.test_noise**2)
        return estimated_epsilon(self.answers.cost + tests, order, self.plan.delta) + made.estimate.epsilon

    @property
    def answered(self) -> int:
        """Queries that passed the test; the others are paid for as well."""
        return int((self.answers.labels != UNANSWERED).sum())


@default_aside
def fit(
    teacher: Teacher,
    data: PrivateData,
    public_inputs: Tensor,
    plan: PatePlan,
    *,
    student: Student | None = None,
    seed: int | None = None,
) -> PateRun:
    """Teachers vote on public inputs that the student chooses; the student learns from the noisy votes.

    teacher         learns from its part of the records: LinearTeacher, NetworkTeacher, or anything with `votes`
    public_inputs   inputs that nobody needs to protect, like the records' features; labels are not needed
    student         None: supervised softmax regression
    seed            of the student and its choice, which see nothing private; the votes' noise is always fresh
    """
    if type(data) is not PrivateData:
        raise Refusal(f"data={type(data).__name__}: teachers need the records behind PrivateData itself")
    if not isinstance(public_inputs, Tensor) or public_inputs.ndim < 2:
        raise Refusal("public_inputs: must be a tensor with one row per input")
    if not bool(torch.isfinite(public_inputs).all()):
        raise Refusal("public_inputs: some are not finite numbers; leave them out")
    classes = data.schema.class_count
    if classes is None:
        raise Refusal("schema: teachers vote for classes; it must declare them")
    chosen = Supervised() if student is None else student
    start = int(torch.randint(2**31, ())) if seed is None else seed
    asked = chosen.choose(public_inputs, plan.mechanism.queries, start)
    _rehearse(chosen, public_inputs, asked, classes, start)
    answers = data.poll(plan.mechanism, teacher, public_inputs[asked], "votes of teachers")
    posterior = chosen.learn(public_inputs, asked, answers, classes, start)
    privacy = Privacy(plan.mechanism.events(), plan.delta, plan.adjacency, data.seeded, (*data.assumptions, PUBLIC))
    return PateRun(posterior, privacy, plan, asked, answers)


def _rehearse(student: Student, inputs: Tensor, asked: Tensor, classes: int, seed: int) -> None:
    """The student on a few inputs with made-up answers: what cannot work fails here, before any charge."""
    first = asked[:REHEARSED]
    others = torch.arange(min(REHEARSED, len(inputs)))
    rows = torch.cat([first, others[~torch.isin(others, first)]])
    labels = torch.arange(len(first)) % classes
    student.learn(inputs[rows], torch.arange(len(first)), VotesAnswers(labels), classes, seed)
