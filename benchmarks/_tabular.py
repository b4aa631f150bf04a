"""Contenders of the race on tables, each with the same declared facts, the same budget, and settings by public rule.

None of them may look at a record to choose a setting: bounds, classes, categories and the number of records are those
of the schema, whatever a contender would otherwise read off the data in silence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from confide.data.preprocessing import Encoder
from confide.data.schema import Schema
from confide.data.table import Table

Array = Any
DELTA = 1e-5
LEVEL_90 = 1.6449  # standard deviations to either side of a normal interval of 90 %


@dataclass(frozen=True)
class Race:
    """One data set, settled: what every contender is given."""

    schema: Schema
    train: Table
    test: Table

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.schema)

    @cached_property
    def x(self) -> Array:
        return self.encoder.features(self.train)

    @cached_property
    def y(self) -> Array:
        return self.encoder.targets(self.train.labels)

    @cached_property
    def x_test(self) -> Array:
        return self.encoder.features(self.test)

    @cached_property
    def y_test(self) -> Array:
        return self.encoder.targets(self.test.labels)

    @property
    def classes(self) -> int | None:
        return self.schema.class_count


@dataclass(frozen=True)
class Outcome:
    """Probabilities of the classes, or means with deviations in units in which the target's range is [-1, 1]."""

    centre: Array
    deviation: Array | None = None


Contender = Callable[[Race, float, int], Outcome]


# -- confide -----------------------------------------------------------------------------------------------------------


def confide_by(method: str) -> Contender:
    def run(race: Race, epsilon: float, seed: int) -> Outcome:
        from confide import PrivateBayesClassifier, PrivateBayesRegressor

        options: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "schema": race.schema}
        if race.classes is not None:
            model: Any = PrivateBayesClassifier(method, **options).fit(*_rows(race.train))
            return Outcome(np.asarray(model.predict_proba(_rows(race.test)[0])))
        model = PrivateBayesRegressor(method, **options).fit(*_rows(race.train))
        mean, deviation = model.predict(_rows(race.test)[0], return_std=True)
        scale = race.encoder.target_scale
        return Outcome((mean - race.encoder.target_centre) / scale, deviation / scale)

    return run


def _rows(table: Table) -> tuple[Any, Any]:
    """As a data frame, or as an array where columns have no names."""
    if table.block is not None:
        return table.block, table.labels
    import pandas as pd

    return pd.DataFrame(dict(table.columns)), table.labels


# -- interpret ---------------------------------------------------------------------------------------------------------


def boosting(**settings: Any) -> Contender:
    """DP-EBM (Nori et al., 2021). Targets are fed centred on the middle of their declared range.

    The regressor adds noise for the target's range, and its first residual is the target itself: uncentred, a target
    far from zero would be learnt in small steps from there.
    """

    def run(race: Race, epsilon: float, seed: int) -> Outcome:
        from interpret.privacy import DPExplainableBoostingClassifier, DPExplainableBoostingRegressor

        x, x_test, kinds, bounds = _columns(race)
        options: dict[str, Any] = {
            "epsilon": epsilon, "delta": DELTA, "feature_types": kinds, "privacy_bounds": bounds,
            "random_state": seed, "n_jobs": 1, **settings,
        }  # fmt: skip
        if race.classes is not None:
            model = DPExplainableBoostingClassifier(**options).fit(x, race.y)
            return Outcome(_in_order(model.predict_proba(x_test), model.classes_, race.classes))
        model = DPExplainableBoostingRegressor(privacy_target_min=-1.0, privacy_target_max=1.0, **options)
        return Outcome(model.fit(x, race.y.astype(float)).predict(x_test))

    return run


def _columns(race: Race) -> tuple[Array, Array, list[str], dict[int, tuple[float, float]]]:
    """Raw columns for tools that take categories as they are; numbers clamped to their declared bounds."""
    if not race.schema.columns:
        width = race.x.shape[1]
        return race.x, race.x_test, ["continuous"] * width, dict.fromkeys(range(width), (-1.0, 1.0))
    kinds: list[str] = []
    bounds: dict[int, tuple[float, float]] = {}
    parts: tuple[list[Array], list[Array]] = ([], [])
    for place, column in enumerate(race.schema.columns):
        number = column.kind == "numeric"
        kinds.append("continuous" if number else "nominal")
        limits = race.schema.bounds_of(place, column)
        if number and limits is not None:
            bounds[place] = limits
        for part, table in zip(parts, (race.train, race.test), strict=True):
            values = np.asarray(table.columns[column.name])
            part.append(np.clip(values.astype(float), *limits) if number and limits else values.astype(str))
    return (*(np.array(list(zip(*part, strict=True)), dtype=object) for part in parts), kinds, bounds)  # type: ignore[return-value]


def _in_order(probabilities: Array, found: Array, classes: int) -> Array:
    whole = np.full((len(probabilities), classes), 1e-6)
    whole[:, np.asarray(found, dtype=int)] = probabilities
    return whole / whole.sum(1, keepdims=True)


# -- diffprivlib -------------------------------------------------------------------------------------------------------


def diffprivlib_model(race: Race, epsilon: float, seed: int) -> Outcome:
    """Naive Bayes on the encoded columns, or linear regression: what runs with bounds alone. Pure epsilon."""
    import sklearn.tree._tree as tree

    for name, value in (("DOUBLE", np.float64), ("DTYPE", np.float32)):
        if not hasattr(tree, name):  # names that newer releases of scikit-learn have dropped
            setattr(tree, name, value)
    from diffprivlib import models

    width = race.x.shape[1]
    x, x_test = race.x.astype(float), race.x_test.astype(float)
    if race.classes is not None:
        model = models.GaussianNB(epsilon=epsilon, bounds=(-np.ones(width), np.ones(width)), random_state=seed)
        model.fit(x, race.y)
        return Outcome(_in_order(np.nan_to_num(model.predict_proba(x_test)), model.classes_, race.classes))
    line = models.LinearRegression(epsilon=epsilon, bounds_X=(-1, 1), bounds_y=(-1, 1), random_state=seed)
    return Outcome(np.nan_to_num(line.fit(x, race.y.astype(float)).predict(x_test)))


# -- Opacus ------------------------------------------------------------------------------------------------------------


def opacus_linear(race: Race, epsilon: float, seed: int) -> Outcome:
    """DP-SGD by Opacus on a linear model of the encoded columns: a 32nd of the records a batch, 20 passes, clip 1."""
    import torch
    from opacus import PrivacyEngine
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(seed)
    outputs = race.classes or 1
    model: Any = nn.Linear(race.x.shape[1], outputs)
    nn.init.zeros_(model.weight)
    targets = torch.as_tensor(race.y).long() if race.classes is not None else torch.as_tensor(race.y).float()[:, None]
    loss = nn.CrossEntropyLoss() if race.classes is not None else nn.MSELoss()
    batch = max(1, min(max(128, len(race.x) // 32), len(race.x) // 4))
    loader: Any = DataLoader(TensorDataset(torch.as_tensor(race.x), targets), batch_size=batch)
    optimiser: Any = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimiser, loader = PrivacyEngine().make_private_with_epsilon(
        module=model, optimizer=optimiser, data_loader=loader,
        target_epsilon=epsilon, target_delta=DELTA, epochs=20, max_grad_norm=1.0,
    )  # fmt: skip
    for _ in range(20):
        for x, y in loader:
            optimiser.zero_grad()
            loss(model(x), y).backward()
            optimiser.step()
    with torch.no_grad():
        found = model(torch.as_tensor(race.x_test))
    if race.classes is not None:
        return Outcome(found.softmax(1).numpy())
    return Outcome(found[:, 0].numpy())


# -- scikit-learn, not private -----------------------------------------------------------------------------------------


def not_private(race: Race, epsilon: float, seed: int) -> Outcome:
    """Gradient boosting without any privacy: what could be had."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    if race.classes is not None:
        model = HistGradientBoostingClassifier(random_state=seed).fit(race.x, race.y)
        return Outcome(_in_order(model.predict_proba(race.x_test), model.classes_, race.classes))
    return Outcome(HistGradientBoostingRegressor(random_state=seed).fit(race.x, race.y).predict(race.x_test))


CONTENDERS: Mapping[str, Contender] = {
    "confide": confide_by("auto"),
    "confide additive": confide_by("additive"),
    "dp-ebm": boosting(),
    "dp-ebm, rate 0.05": boosting(learning_rate=0.05),
    "diffprivlib": diffprivlib_model,
    "opacus linear": opacus_linear,
    "not private": not_private,
}


def quietly(contender: Contender, race: Race, epsilon: float, seed: int) -> Outcome:
    """Without the warnings of other people's libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return contender(race, epsilon, seed)
