"""A method from its name and the settings that a user typed: `--method sgld --set decay=0.33`.

Settings are the fields of the method's own class, so a new method brings its own without an edit here.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from confide import methods, rules
from confide.cli import options
from confide.errors import CommandError
from confide.methods.base import Method
from confide.models import priors
from confide.wording import meant

PRIORS = ("gaussian", "laplace", "scale-mixture", "flat")
FACTOR_PER_RECORD = ("ep", "adf")
"""Methods that are known by name and cannot be had here."""


def method_or_rule(
    name: str, settings: Sequence[str], prior_scale: float | None, prior: str | None = None
) -> Method | str:
    """The method of that name with the given settings, or "auto" for the public rule's choice.

    Settings or a prior beside "auto" are those of the sampler, which has both.
    """
    if name == "auto" and not settings and prior_scale is None and prior is None:
        return name
    return make_method(name, settings, prior_scale, prior)


def make_method(name: str, settings: Sequence[str], prior_scale: float | None, prior: str | None = None) -> Method:
    """The method of that name with the given settings, each checked by the method itself; "auto" is the sampler."""
    if name in FACTOR_PER_RECORD:
        raise CommandError(
            f"--method={name}: keeps a factor for every record, so that it cannot be private; sep is its private form, "
            "and `confide papers run dp-sep` compares with it"
        )
    known = options.choice("--method", name, ("auto", *methods.names()))
    cls = methods.get(rules.SAMPLER if known == "auto" else known)
    hints = get_type_hints(cls)
    fields = _fields(cls)
    values: dict[str, Any] = {}
    for text in settings:
        typed_key, separator, typed = text.partition("=")
        key = typed_key.replace("-", "_")
        if not separator or not key:
            raise CommandError(f"--set={text}: must have the form NAME=VALUE")
        if key not in fields or not is_plain(hints[key]):
            raise CommandError(
                f"--set={text}: {cls.name} has no setting {typed_key}; it has {_known(cls)}{meant(key, fields)}"
            )
        if key in values:
            raise CommandError(f"--set={text}: {key} is set twice; give it once")
        values[key] = parsed(f"--set={text}", typed, hints[key])
    chosen = _prior(prior, prior_scale)
    if chosen is not None:
        if "prior" not in fields:
            typed = f"--prior={prior}" if prior is not None else f"--prior-scale={prior_scale:g}"
            raise CommandError(f"{typed}: {name} has no prior of its own; leave it out")
        values["prior"] = chosen
    try:
        return cls(**values)
    except TypeError as error:  # a method whose posterior is Gaussian says so, in a sentence of its own
        if prior is None:
            raise
        raise CommandError(f"--prior={prior}: {error}") from None


def _prior(name: str | None, scale: float | None) -> priors.Prior | None:
    """The prior over the weights that was asked for, or None for the method's own."""
    if scale is not None:
        options.number("--prior-scale", scale, above=0, most=1e6)
    if name is None and scale is None:
        return None
    known, width = options.choice("--prior", name or "gaussian", PRIORS), 1.0 if scale is None else scale
    if known == "flat":
        if scale is not None:
            raise CommandError(f"--prior-scale={scale:g}: a flat prior has no scale; leave it out")
        return priors.FlatPrior()
    if known == "scale-mixture":  # the narrow part a tenth as wide, as by default
        return priors.ScaleMixturePrior(wide=width, narrow=width / 10)
    return priors.LaplacePrior(width) if known == "laplace" else priors.GaussianPrior(width)


def is_plain(hint: Any) -> bool:
    """Whether a value of this type can be typed on a command line."""
    return all(
        kind in (int, float, str, bool, types.NoneType) or get_origin(kind) is Literal for kind in _alternatives(hint)
    )


def parsed(where: str, text: str, hint: Any) -> Any:
    """The typed text as a value of the field's type."""
    alternatives = _alternatives(hint)
    if types.NoneType in alternatives and text.lower() in ("none", ""):
        return None
    for kind in alternatives:
        if get_origin(kind) is Literal:
            if text in get_args(kind):
                return text
            raise CommandError(f"{where}: must be one of {', '.join(map(str, get_args(kind)))}")
        if kind is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
            raise CommandError(f"{where}: must be true or false")
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                raise CommandError(f"{where}: must be a {'whole number' if kind is int else 'number'}") from None
    return text


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fields(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _known(cls: type[Any]) -> str:
    hints = get_type_hints(cls)
    return ", ".join(name for name in _fields(cls) if is_plain(hints[name])) or "no settings"
