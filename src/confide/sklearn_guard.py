"""What scikit-learn does around a private estimator: who reads the records beside it, and who hides that it refused.

A step that learns from the records before the estimator reads them without payment. Cross-validation and searches
publish scores without noise, and fit once per fold. Estimators of estimators (calibration, stacking, bagging, ...) fit
something else to the same records, or hand a record over several times. All are seen from the frames that call `fit`;
the user is warned, and a budget that ran out is not turned into a score of NaN.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from confide.errors import PrivacyWarning

PIPELINE, FOLDS, SEARCH = "sklearn.pipeline", "sklearn.model_selection._validation", "sklearn.model_selection._search"
AROUND = ("sklearn.base", "sklearn.utils.", PIPELINE, FOLDS, SEARCH)
"""Modules of scikit-learn between a call and `fit` that read no records, or are warned of by themselves."""
MOST_FRAMES = 200
"""Frames that are looked at: a pipeline in a search is some twenty away."""


def frames() -> list[FrameType]:
    """Those that called, the nearest first."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < MOST_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found


def warn_of_readers(calling: list[FrameType]) -> None:
    """Warn where something else than the estimator reads the records that it is fitted to."""
    learning = _learning_steps(calling)
    if learning:
        warnings.warn(
            f"Pipeline: {', '.join(learning)} before the estimator learns from the records without paying, and nothing "
            "is claimed for what it shows; leave it out and declare bounds=, by which inputs are scaled",
            PrivacyWarning,
            stacklevel=4,
        )
    if within_folds(calling):
        warnings.warn(
            "cross-validation: scores without noise tell of the records they were measured on, and every fold is "
            "charged; use confide.PrivateSearchCV, which pays for fits and scores from one budget",
            PrivacyWarning,
            stacklevel=4,
        )

    outer = _outer_estimator(calling)
    if outer:
        warnings.warn(
            f"{outer}: fits more than this estimator to the records, or fits it to some of them several times, and "
            "pays for none of that; nothing is claimed for what it shows, so fit this estimator by itself",
            PrivacyWarning,
            stacklevel=4,
        )


def within_folds(calling: list[FrameType]) -> bool:
    """Whether scikit-learn fits this estimator to the folds of a cross-validation or a search."""
    return any(frame.f_globals.get("__name__") in (FOLDS, SEARCH) for frame in calling)


def hides_errors(calling: list[FrameType]) -> bool:
    """Whether a cross-validation makes a score of NaN of whatever is raised."""
    asked = (
        frame.f_locals.get("error_score", "raise") for frame in calling if frame.f_globals.get("__name__") == FOLDS
    )
    return any(value != "raise" for value in asked)


def _outer_estimator(calling: list[FrameType]) -> str:
    """The name of scikit-learn's estimator of estimators that calls; empty where none does."""
    modules = [(str(frame.f_globals.get("__name__")), frame) for frame in calling]
    outer = [one for one in modules if one[0].startswith("sklearn.") and not one[0].startswith(AROUND)]
    owners = (type(frame.f_locals["self"]).__name__ for _, frame in outer if "self" in frame.f_locals)
    return next(owners, outer[0][0] if outer else "")  # in another process only its functions are there


def _learning_steps(calling: list[FrameType]) -> list[str]:
    """Names of the steps of a pipeline before its last one that are fitted to the records."""
    for frame in calling:
        owner = frame.f_locals.get("self")
        steps = getattr(owner, "steps", None)
        if isinstance(steps, list) and any(one.__module__ == PIPELINE for one in type(owner).__mro__):
            return [type(step).__name__ for _, step in steps[:-1] if _learns(step)]
    return []


def _learns(step: Any) -> bool:
    from sklearn.utils import get_tags

    if step is None or step == "passthrough":
        return False
    try:
        return bool(get_tags(step).requires_fit)
    except Exception:  # a transformer of one's own that says nothing about itself
        return True
