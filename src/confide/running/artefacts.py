"""What a run leaves on disk: one new directory.

    posterior.safetensors   the posterior; no pickle
    run.json                settings, events, epsilons, metrics, schema, versions and hashes: strict JSON
    report.html             the same for people

Everything is written to a hidden directory beside the target, which is renamed at the end. The posterior comes first,
for it was paid for and cannot be had again without paying again: what fails after it is written leaves it there, and
`Unfinished` says where. JSON has no infinity and no NaN: infinities are the strings "Infinity" and "-Infinity", which
`float` reads back, and NaN is null. How long the run took is not written: it depends on the records of its batches.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from confide.data.preprocessing import Encoder
from confide.data.schema import Schema
from confide.devices.default import default_aside
from confide.errors import Refusal, Unfinished
from confide.evaluate.metrics import refuse_private
from confide.models.likelihoods import Likelihood
from confide.posteriors.base import Posterior
from confide.posteriors.description import one_sentence
from confide.posteriors.drafts import clean_up, make_folder, sync
from confide.posteriors.files import POSTERIOR as POSTERIOR
from confide.posteriors.files import load_posterior
from confide.privacy.events import Event, event_from_dict, event_to_dict
from confide.privacy.ledger import Ledger
from confide.privacy.statement import Privacy
from confide.report import PUBLIC, SEPARATE, Evaluation, render
from confide.report.trail import versions
from confide.report.verdict import bounds_of, statement_of
from confide.report.words import settings
from confide.wording import json_text

if TYPE_CHECKING:
    from confide.running.fit import Run

FORMAT = 1  # Raised when runs of before could be misread.
RECORD, REPORT = "run.json", "report.html"
UNVERIFIED = "the events in the folder of the run are what was released (not verified against a ledger)"
"""Stands in the statement of a run that was read back."""


def save_run(
    run: Run,
    directory: str | os.PathLike[str],
    *,
    metrics: Mapping[str, float] | None = None,
    evaluation: Evaluation | None = None,
    config: Mapping[str, Any] | None = None,
    encoder: Encoder | Mapping[str, Any] | None = None,
    title: str | None = None,
) -> Path:
    """Write the run to a new directory and return its path.

    A report that cannot be made or written raises `Unfinished` once the rest is in place.

    metrics     numbers on a test set; computed from `evaluation` if left out
    evaluation  predictions and truth of a declared test set, for the plots of the report
    config      settings to keep beside the run
    encoder     how raw records become inputs
    title       of the report
    """
    target = Path(directory)
    check_new(target)
    if metrics is None and evaluation is not None:
        metrics = evaluation.metrics()
    created = datetime.now(UTC)
    trouble: Exception | None = None
    with _draft_of(target) as draft:
        run.posterior.save(draft / POSTERIOR)
        hashes = {POSTERIOR: sha256(draft / POSTERIOR)}
        record = run_record(run, metrics=metrics, evaluation=evaluation, config=config, encoder=encoder)
        record |= {"created": created.isoformat(timespec="seconds"), "sha256": hashes}
        _write_record(record, draft)
        try:
            page = render(run, metrics, evaluation, title=title, config=config, hashes=hashes, created=created)
            (draft / REPORT).write_text(page, encoding="utf-8")
            _write_record({**record, "sha256": {**hashes, REPORT: sha256(draft / REPORT)}}, draft)
        except Exception as error:
            trouble = error
            with contextlib.suppress(OSError):
                (draft / REPORT).unlink(missing_ok=True)
                _write_record(record, draft)
    if trouble is not None:
        raise Unfinished(
            f"directory={str(target)!r}: {REPORT} could not be written ({_reason(trouble)}); {POSTERIOR} and {RECORD} "
            "are kept there",
            target,
        ) from trouble
    return target


def save_posterior(
    posterior: Posterior,
    privacy: Privacy,
    schema: Schema,
    directory: str | os.PathLike[str],
    *,
    encoder: Encoder | Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Write what did not come out of the loop, such as a student of PATE, so that `load_run` and its commands read it.

    about   settings of whatever made it, kept beside it
    """
    target = Path(directory)
    check_new(target)
    with _draft_of(target) as draft:
        posterior.save(draft / POSTERIOR)
        bounds = bounds_of(privacy)
        record = {
            "format": FORMAT,
            **dict(about or {}),
            "events": [event_to_dict(event) for event in privacy.events],
            "delta": privacy.delta,
            "adjacency": privacy.adjacency,
            "epsilon": {name: bound.epsilon for name, bound in bounds.items()},
            "kind": {name: bound.kind for name, bound in bounds.items()},
            "statement": statement_of(privacy),
            "assumptions": list(privacy.assumptions),
            "ledger": {"proven": privacy.ledger, "head": None},
            "seeded": privacy.seeded,
            "metrics": dict(metrics or {}),
            "posterior": {"kind": posterior.kind, "facts": dict(posterior.facts)},
            "schema": schema.to_dict(),
            "encoder": encoder.to_dict() if isinstance(encoder, Encoder) else encoder,
            "versions": versions(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "sha256": {POSTERIOR: sha256(draft / POSTERIOR)},
        }
        _write_record(record, draft)
    return target


@default_aside
def measured_on(posterior: Posterior, test: Any, public: bool = False) -> Evaluation:
    """Predictions for a pair (inputs as the network sees them, labels or values), beside the truth."""
    if not (isinstance(test, tuple | list) and len(test) == 2):
        refuse_private("test", test)
        raise Refusal(f"test={type(test).__name__}: must be a pair (inputs, labels or values)")
    for part in test:
        refuse_private("test", part)
    x, y = (torch.as_tensor(part) for part in test)
    if x.is_floating_point():
        x = x.to(next(posterior.module.parameters()).dtype)
    return Evaluation(posterior.predict(x), y, PUBLIC if public else SEPARATE)


def _write_record(record: Mapping[str, Any], directory: Path) -> None:
    text = json_text(record, pretty=True, infinity_as_text=True)
    (directory / RECORD).write_text(text, encoding="utf-8")


def _reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def run_record(
    run: Run,
    *,
    metrics: Mapping[str, float] | None = None,
    evaluation: Evaluation | None = None,
    config: Mapping[str, Any] | None = None,
    encoder: Encoder | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything about a run but the posterior's numbers, as plain values."""
    bounds = bounds_of(run.privacy)
    return {
        "format": FORMAT,
        "config": dict(config or {}),
        "method": {"name": run.method.name, "parameters": settings(run.method)},
        "plan": _plan_record(run.plan),
        "events": [event_to_dict(event) for event in run.privacy.events],
        "delta": run.privacy.delta,
        "adjacency": run.privacy.adjacency,
        "epsilon": {name: bound.epsilon for name, bound in bounds.items()},
        "kind": {name: bound.kind for name, bound in bounds.items()},
        "attacker": _attacker_record(run.privacy, bounds["pld"].epsilon),
        "statement": statement_of(run.privacy),
        "assumptions": list(run.privacy.assumptions),
        "ledger": {"proven": run.privacy.ledger, "head": None if run.ledger is None else dict(run.ledger)},
        "seeded": run.privacy.seeded,
        "metrics": dict(metrics or {}),
        "judgement": _judgement_record(run, evaluation),
        "test": None if evaluation is None else {"inputs": evaluation.inputs, "source": evaluation.source},
        "posterior": {"kind": run.posterior.kind, "facts": dict(run.posterior.facts)},
        "schema": run.schema.to_dict(),
        "encoder": encoder.to_dict() if isinstance(encoder, Encoder) else encoder,
        "versions": versions(),
    }


def _judgement_record(run: Run, evaluation: Evaluation | None) -> dict[str, Any] | None:
    """The intervals of the metrics, the baseline, and every class."""
    if evaluation is None:
        return None
    found = evaluation.judgement(run.schema.classes)
    return {"intervals_95": evaluation.intervals(), **({} if found is None else found.to_dict())}


def _attacker_record(privacy: Privacy, epsilon: float | None) -> dict[str, Any] | None:
    if epsilon is None or not math.isfinite(epsilon):
        return None
    best = settings(privacy.attacker())
    rates = best.pop("tpr_at_fpr")
    return {**best, **{f"tpr_at_fpr_{rate:g}": power for rate, power in rates.items()}}


def _plan_record(plan: Any) -> dict[str, Any]:
    return {
        "records": plan.records,
        "steps": plan.steps,
        "delta": plan.delta,
        "adjacency": plan.adjacency,
        "target_epsilon": plan.target_epsilon,
        "blocks": [{**settings(mechanism), "steps": steps} for mechanism, steps in plan.blocks],
    }


@dataclass(frozen=True)
class SavedRun:
    """A run read back: the posterior is ready to predict, the privacy statement to be computed again.

    encoder   as a mapping, or None: `confide.data.preprocessing.Encoder.from_dict` makes it work again
    record    all of run.json
    """

    directory: Path
    posterior: Posterior
    privacy: Privacy
    schema: Schema
    metrics: Mapping[str, float]
    encoder: Mapping[str, Any] | None
    record: Mapping[str, Any]


@default_aside
def load_run(
    directory: str | os.PathLike[str],
    module: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    ledger: Ledger | None = None,
) -> SavedRun:
    """Read a run back, and refuse a posterior that is not, byte for byte, the one that was saved.

    A network of confide's own is rebuilt; any other must be given as `module`, and a likelihood of one's own as
    `likelihood`. The events in a folder can be written by anybody: the privacy statement says that they are not
    verified, unless the `ledger` that was charged is given and holds them.
    """
    base = Path(directory)
    if not base.is_dir():
        raise Refusal(f"directory={str(base)!r}: not a directory; name one that save_run or `confide fit` wrote")
    record = _read_record(_inside(base, RECORD))
    path = _inside(base, POSTERIOR)
    noted = record["sha256"].get(POSTERIOR)
    if sha256(path) != noted:
        raise Refusal(
            f"directory={str(base)!r}: {POSTERIOR} is not the file that was saved (its SHA-256 differs from the one in "
            f"{RECORD}); restore it, or fit again"
        )
    privacy, schema, metrics = _rebuilt(record, base / RECORD)
    if ledger is None:
        privacy = replace(privacy, assumptions=(*privacy.assumptions, UNVERIFIED))
    else:
        _verify(privacy, ledger, base)
    posterior = load_posterior(path, module, likelihood=likelihood)
    _check_width(record, posterior, base)
    return SavedRun(base, posterior, privacy, schema, metrics, record["encoder"], record)


def _check_width(record: Mapping[str, Any], posterior: Posterior, base: Path) -> None:
    """What is made of a picture is a rule of confide's own, which another version may have changed."""
    learnt, encoder = getattr(getattr(posterior.module, "recipe", None), "features", None), record["encoder"]
    if learnt is None or not isinstance(encoder, Mapping) or encoder.get("layout") != "features":
        return
    made = Encoder.from_dict(encoder).output_shape
    if made != (learnt,):
        raise Refusal(
            f"directory={str(base)!r}: its network takes {learnt} numbers of a picture, and this version makes "
            f"{made[0] if made else 'none'}; fit again, or use the one that {RECORD} names"
        )


def _verify(privacy: Privacy, ledger: Ledger, base: Path) -> None:
    """The ledger must hold every event, under one data set; a seeded run was booked as not private."""
    if privacy.seeded:
        raise Refusal(f"directory={str(base)!r}: was made from a seed, so there is nothing in the ledger to verify")
    due = _counted(privacy.events)
    for dataset in {entry.dataset for entry in ledger.entries()}:
        booked = _counted(ledger.events(dataset))
        if all(count <= booked[event] for event, count in due.items()):
            return
    raise Refusal(f"directory={str(base)!r}: its events are not in this ledger; name the one that was charged")


def _counted(events: Iterable[Event]) -> Counter[Event]:
    found: Counter[Event] = Counter()
    for event in events:
        found[replace(event, count=1)] += event.count
    return found


def _rebuilt(record: dict[str, Any], path: Path) -> tuple[Privacy, Schema, dict[str, float]]:
    try:
        events = tuple(event_from_dict(event) for event in record["events"])
        vouched = tuple(record.get("assumptions", ()))
        proven = str(record.get("ledger", {}).get("proven", ""))
        privacy = Privacy(events, record["delta"], record["adjacency"], record["seeded"], vouched, proven)
        metrics = {name: math.nan if value is None else float(value) for name, value in record["metrics"].items()}
        return privacy, Schema.from_dict(record["schema"]), metrics
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError, RecursionError) as error:
        said = one_sentence(error)
        raise Refusal(f"path={str(path)!r}: damaged; a value is not what save_run writes ({said})") from None


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(f"path={str(path)!r}: not a readable record of a run ({one_sentence(error)})") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        raise Refusal(
            f"path={str(path)!r}: format {found!r} is not known to this version of confide, which reads format {FORMAT}"
        )
    needed = ("events", "delta", "adjacency", "seeded", "metrics", "schema", "encoder", "sha256")
    absent = [key for key in needed if key not in record]
    if absent or not isinstance(record["sha256"], dict):
        raise Refusal(f"path={str(path)!r}: damaged; {', '.join(absent) or 'sha256'} is missing")
    return record


def _refuse_constant(name: str) -> Any:
    raise Refusal(f"{name} is not JSON")


def _inside(base: Path, name: str) -> Path:
    """The file of that name, which must lie in the directory itself: a link that leads elsewhere is refused."""
    path = base / name
    if not path.is_file():
        raise Refusal(f"directory={str(base)!r}: has no {name}; name a directory that save_run or `confide fit` wrote")
    if path.resolve().parent != base.resolve():
        raise Refusal(f"directory={str(base)!r}: {name} leads outside the directory; copy the file into it")
    return path


def check_new(target: Path) -> None:
    """Refuse a target that exists, before anything is written."""
    if not target.name or target.name == "..":
        raise Refusal(f"directory={str(target)!r}: must name a new directory")
    if os.path.lexists(target):
        raise Refusal(f"directory={str(target)!r}: exists already; name a new one, or move the old one away")


@contextlib.contextmanager
def _draft_of(target: Path) -> Iterator[Path]:
    """A draft beside the target, renamed to it at the end.

    A failure before a posterior is in it removes it, and every parent made for it; a later one leaves it there.
    """
    missing = [parent for parent in (target, *target.parents)[1:] if not parent.exists()]
    clean_up(target, keep=lambda left: _whole(left / POSTERIOR))
    draft = target.with_name(f".{target.name}.{secrets.token_hex(6)}.partial")
    try:
        try:
            make_folder(target.parent)
            draft.mkdir()
        except OSError as error:
            raise Refusal(f"directory={str(target)!r}: cannot be written ({error.strerror})") from None
        yield draft
        # On the disk before the rename, so that a power cut cannot leave a finished directory with empty files.
        for path in (*draft.iterdir(), draft):
            sync(path)
        check_new(target)
        draft.rename(target)
        sync(target.absolute().parent)
    except BaseException as error:
        if _whole(draft / POSTERIOR):
            if not isinstance(error, Exception):
                raise
            message = f"directory={str(target)!r}: could not be finished ({_reason(error)}); {POSTERIOR} is in {draft}"
            raise Unfinished(message, draft) from error
        shutil.rmtree(draft, ignore_errors=True)
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def _whole(path: Path) -> bool:
    """Whether a posterior can be read; half of one is worth nothing."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return bool(list(file.keys()))
    except (OSError, SafetensorError):
        return False


def sha256(path: Path) -> str:
    """Of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
