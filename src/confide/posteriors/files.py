"""Posteriors read back from their files, and what could not be read back refused before it is paid for.

The kinds of posteriors are a list in this file, as the likelihoods are in theirs: nothing has to be imported first.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from torch import Tensor, nn

from confide.devices.default import default_aside
from confide.errors import Refusal
from confide.models.flat import trainable
from confide.models.likelihoods import Likelihood, check_likelihood
from confide.posteriors.additive import AdditiveGaussian
from confide.posteriors.base import Posterior
from confide.posteriors.description import NUMBERS, Damaged, check_outputs, likelihood_of, network_of, one_sentence
from confide.posteriors.draws import Draws
from confide.posteriors.low_rank import LowRankGaussian
from confide.posteriors.mapped import open_draws
from confide.posteriors.natural import NaturalGaussian
from confide.posteriors.variational import DiagonalGaussian, DropoutNetwork

KINDS: tuple[type[Posterior], ...] = (
    Draws, DiagonalGaussian, LowRankGaussian, DropoutNetwork, NaturalGaussian, AdditiveGaussian
)  # fmt: skip
POSTERIOR = "posterior.safetensors"
"""The file of a posterior in the folder of a run."""
MAPPED_ABOVE = 1 << 28
"""Bytes of a file of draws, a quarter of a gigabyte, above which it is read piece by piece instead of as a whole."""


@default_aside
def load_posterior(
    path: str | Path,
    module: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    kind: type[Posterior] | None = None,
) -> Posterior:
    """Read a posterior back. What is confide's own is rebuilt; anything of one's own is given again.

    path        the file, or the folder of a run
    module      the network that was fitted; needed unless confide.networks made it
    likelihood  that it was fitted with; needed unless it is one of confide.likelihoods
    kind        the class of a posterior that a method of one's own returns
    """
    path = Path(path) / POSTERIOR if Path(path).is_dir() else path
    found, tensors = _read(path)
    cls = {one.kind: one for one in (*KINDS, *(() if kind is None else (kind,)))}.get(str(found.get("kind")))
    if cls is None:
        raise Refusal(
            f"path={str(path)!r}: not a posterior written by this version of confide; if a method of your own made it, "
            "pass its class as kind="
        )
    if tensors is None:
        return open_draws(path, module, likelihood=likelihood)
    try:
        network, known = network_of(found, module, tensors), likelihood_of(found, likelihood)
        check_outputs(network, known)
        posterior: Posterior = cls.rebuilt(network, known, tensors, dict(found["facts"]))
        return posterior
    except Damaged as error:
        raise Refusal(f"path={str(path)!r}: {error}") from None
    except Refusal:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError, MemoryError):
        raise Refusal(f"path={str(path)!r}: is damaged or incomplete; use another copy") from None


def _read(path: str | Path) -> tuple[Mapping[str, Any], dict[str, Tensor] | None]:
    """What the file says about itself, and its tensors; None for draws that are too many to be read as a whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as archive:
            about = json.loads((archive.metadata() or {}).get("confide", "null"))
            about = about if isinstance(about, dict) else {}
            if about.get("kind") == Draws.kind and Path(path).stat().st_size > MAPPED_ABOVE:
                return about, None
            return about, {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise Refusal(f"path={str(path)!r}: not a readable posterior file ({one_sentence(error)})") from None


def check_saveable(module: nn.Module, likelihood: Likelihood, posterior: Callable[..., Posterior]) -> None:
    """Refuse what could not be saved or loaded again; called before anything is charged.

    posterior   the method's function of that name: what it says it returns is what will be saved
    """
    check_likelihood(likelihood)
    for parameter in trainable(module):
        if parameter.dtype not in NUMBERS.values():
            raise Refusal(
                f"module: a parameter is of type {parameter.dtype}, which no posterior file holds; use one of "
                f"{', '.join(NUMBERS)}" + "; confide.networks.real_pairs(module) does" * parameter.is_complex()
            )
    try:
        made = get_type_hints(posterior).get("return")
    except NameError:
        return  # a type that the method names for its readers alone
    if inspect.isclass(made) and made not in (Posterior, Any, object):
        absent = [name for name in _MEMBERS if not hasattr(made, name) and name not in _annotated(made)]
        if absent:
            raise Refusal(
                f"method: its posterior, {made.__name__}, has no {', '.join(absent)}, so it could not be saved and "
                "loaded; return confide.posteriors.draws.Draws, or complete it (confide.posteriors.base.Posterior)"
            )


_MEMBERS = ("kind", "save", "rebuilt")


def _annotated(cls: type[Any]) -> set[str]:
    return {name for one in cls.__mro__ for name in vars(one).get("__annotations__", {})}
