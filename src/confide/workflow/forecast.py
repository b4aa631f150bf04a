"""How long a fit will take, told before it starts: one answer about made-up records, times the steps of the plan."""

from __future__ import annotations

import math
import time

import torch

from confide.data import trees
from confide.data.streaming import MappedRecords
from confide.mechanism.gaussian import SampledGaussian
from confide.running.fit import asked, make_problem
from confide.sources.private_data import PrivateData
from confide.workflow.run import Job

MOST_RECORDS = 256  # made-up ones in the answer that is timed; a larger batch takes as much longer as it is larger
WORTH_TELLING = 60.0  # seconds; nobody wonders before


def expected_seconds(job: Job) -> float:
    """A guess, good to a factor of two or so. No record is read: shapes alone decide."""
    plan, schema = job.plan, job.settled.schema
    problem = make_problem(job.method, job.module, schema, plan, job.likelihood, seed=0)
    state = job.method.init(problem)
    features = job.settled.x.features if isinstance(job.settled.x, MappedRecords) else trees.tree_of(job.settled.x)
    records = max(2, min(MOST_RECORDS, math.ceil(plan.mechanism.expected_batch)))
    x, y = trees.made_up(features, schema.inputs, records), torch.zeros(records)
    source = PrivateData(x, y.long() if schema.class_count is not None else y, schema=schema, seed=0)
    trial = SampledGaussian(1.0, 1.0, 1.0, records, "full-batch")
    told = math.inf
    for _ in range(2):  # the first one examines the network
        started = time.perf_counter()
        release = source.answer(asked(job.method, problem, state), trial)
        told = time.perf_counter() - started
    started = time.perf_counter()
    job.method.tell(problem, state, release)
    after = time.perf_counter() - started
    batches = sum(steps * max(1.0, mechanism.expected_batch / records) for mechanism, steps in plan.blocks)
    return job.request.chains * (batches * told + plan.steps * after)


def in_words(seconds: float) -> str:
    """ "2 minutes", "3 hours": no more digits than such a guess has."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = round(seconds / size)
            return f"{count} {unit}" + ("s" if count != 1 else "")
    return "less than a minute"
