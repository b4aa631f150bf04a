"""Models that are programs: a function of named parameters and one record, where a network would stand.

    model = confide.models.program(
        lambda p, x, y: Normal(p["slope"] @ x, p["noise"]).log_prob(y),
        {"slope": Normal(0.0, 1.0).expand([3]), "noise": HalfNormal(1.0)},
    )

Priors and supports are those of torch.distributions. A parameter lives on the real line, without bounds, and is carried
to its support by torch's `biject_to`; the prior over the unbounded vector has the Jacobian of that map in it, so that
draws, carried back, are draws of the posterior that was written down. The prior of a parameter may be a function of
those before it, as in models of several levels:

    "effect": lambda p: Normal(p["mean"], p["spread"]).expand([groups])

The log-likelihood is given one record and sees no other: whatever it does, the clipping engine runs it isolated. The
prior is not data, and is never given a record.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, biject_to

from confide.data.trees import Tree, map_tensors, size_of
from confide.errors import Refusal
from confide.models.flat import named_slices
from confide.models.predictive import Predictive
from confide.models.program_laws import law_of, numbers_of

Values: TypeAlias = Mapping[str, Tensor]
LogLikelihood: TypeAlias = Callable[[Values, Any, Tensor], Tensor]
Predict: TypeAlias = Callable[[Values, Any], Distribution]
PriorLaw: TypeAlias = Distribution | Callable[[Values], Distribution]

FEW_ROWS = 16
"""So many records are taken one after the other: the weight draws of a record, or an examination. More go together."""


def program(
    log_likelihood: LogLikelihood,
    parameters: Mapping[str, PriorLaw],
    *,
    predict: Predict | None = None,
    start: Mapping[str, Any] | None = None,
) -> Program:
    """A model for `confide.fit`, in the place of a network.

    log_likelihood   log_likelihood(parameters, x, y): log p(y | x, parameters) of one record, a single number. The
                     parameters come by name, each in its support; x and y are the record's own, without an axis of
                     records. A record for which it fails, or gives no finite number, counts as zero
    parameters       the prior of every parameter by name, of torch.distributions, or a function that makes it from the
                     parameters before it
    predict          predict(parameters, x): the distribution of y at new inputs, for predictions
    start            values by name to start from; otherwise each parameter starts at the mean of its prior
    """
    return Program(log_likelihood, parameters, predict, start)


@dataclass(frozen=True)
class Part:
    """One parameter: its name and prior, the shape that users see, and where it stands in the unbounded vector."""

    name: str
    prior: PriorLaw
    shape: torch.Size
    unbounded: torch.Size
    where: slice
    support: str

    def law(self, before: Values) -> Distribution:
        return self.prior if isinstance(self.prior, Distribution) else self.prior(before)


class Program(nn.Module):
    """A program as a module; made by `confide.models.program`. Its one parameter is the unbounded vector."""

    def __init__(
        self,
        log_likelihood: LogLikelihood,
        parameters: Mapping[str, PriorLaw],
        predict: Predict | None,
        start: Mapping[str, Any] | None,
    ) -> None:
        super().__init__()
        _check_function("log_likelihood", log_likelihood, 3)
        if predict is not None:
            _check_function("predict", predict, 2)
        if not isinstance(parameters, Mapping) or not parameters:
            raise Refusal(f"parameters={parameters!r}: must map at least one name to a prior of torch.distributions")
        unknown = sorted(set(start or {}) - set(parameters))
        if unknown:
            raise Refusal(f"start={unknown}: no such parameters; there are {sorted(parameters)}")
        self.log_likelihood, self.predict = log_likelihood, predict
        with torch.random.fork_rng(devices=[]), _unchecked(), torch.no_grad():
            self.parts, values = _laid_out(parameters, start or {})
        self.unconstrained = nn.Parameter(torch.cat([value.reshape(-1) for value in values]))
        if not torch.isfinite(self.log_prior(self.unconstrained.detach())):
            raise Refusal("parameters: their prior has no finite density where the chain starts; give start=")

    def forward(self, *x: Tensor, **named: Tensor) -> ProgramOutput:
        return ProgramOutput(self, self.unconstrained[None], record_tree(x, named))

    def constrained(self, position: Tensor) -> dict[str, Tensor]:
        """The parameters by name, each in its support, from the unbounded vector."""
        return {part.name: value for part, value, _ in self._walk(position)}

    def log_prior(self, position: Tensor) -> Tensor:
        """log density of the unbounded vector: that of the parameters, and the Jacobian of their maps."""
        return torch.stack([density for _, _, density in self._walk(position, True)]).sum()

    def _walk(self, position: Tensor, densities: bool = False) -> Iterator[tuple[Part, Tensor, Tensor]]:
        found: dict[str, Tensor] = {}
        density = position.new_zeros(())
        with _unchecked():
            for part in self.parts:
                law = part.law(found)
                to_support = biject_to(law.support)
                free = position[part.where].reshape(part.unbounded)
                value = to_support(free)
                found[part.name] = value
                if densities:
                    density = law.log_prob(value).sum() + to_support.log_abs_det_jacobian(free, value).sum()
                yield part, value, density

    @torch.no_grad()
    def prior_draw(self) -> Tensor:
        """An unbounded vector from the prior, by torch's own generator."""
        found: dict[str, Tensor] = {}
        position = torch.empty_like(self.unconstrained)
        with _unchecked():
            for part in self.parts:
                law = part.law(found)
                value = law.sample().to(position)
                found[part.name] = value
                position[part.where] = biject_to(law.support).inv(value).reshape(-1)
        return position

    def named_draws(self, draws: Tensor) -> dict[str, Tensor]:
        """Draws of the unbounded vector, (draws, numbers), as draws of every parameter: (draws, *shape)."""
        rows = draws.detach()
        found: dict[str, Tensor] = _for_each(self.constrained, rows)
        return found

    def described(self) -> dict[str, Any]:
        """What a file keeps, so that no other program is taken for this one."""
        return {part.name: [list(part.shape), part.support] for part in self.parts}


@dataclass(frozen=True)
class ProgramOutput:
    """What a program says of a batch: its values, and the inputs that they meet.

    positions   (draws, numbers): the unbounded vector, or several draws of it
    x           inputs, one row for every draw and record, the draws running slower
    """

    program: Program
    positions: Tensor
    x: Tree

    def log_likelihoods(self, y: Tensor) -> Tensor:
        """One number per row."""
        rows, draws = len(y), len(self.positions)
        values = [self.program.constrained(position) for position in self.positions]
        if draws == 1 and rows > FEW_ROWS:
            found: Tensor = _for_each(lambda one: self._said(values[0], *one), (self.x, y))
            return found
        each = rows // draws
        return torch.stack([self._said(values[row // each], *_row((self.x, y), row)) for row in range(rows)])

    def _said(self, values: Values, x: Any, y: Tensor) -> Tensor:
        with _unchecked():
            found = self.program.log_likelihood(values, x, y)
        if not isinstance(found, Tensor) or found.numel() != 1:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise Refusal(
                f"log_likelihood: gave {got} for one record; give a single number, such as .log_prob(y).sum()"
            )
        return found.reshape(())

    @property
    def logits(self) -> Tensor:
        """What `predict` says of every input, as numbers that the likelihood reads again: (rows, ...)."""
        predict, values = self.program.predict, self.program.constrained(self.positions[0])
        if predict is None:
            raise Refusal("predict=None: the program was given without; give predict=, and the law of y at x comes out")

        def said(x: Any) -> Tensor:
            with _unchecked():
                return numbers_of(predict(values, x))

        found: Tensor = _for_each(said, self.x)
        return found


@dataclass(frozen=True)
class ProgramLikelihood:
    """The likelihood that a program brings along.

    sharpness   the curvature of a record's loss
    form        made-up inputs, targets of their type, the number of classes: where a record's information is looked for
    """

    sharpness: float = 1.0
    form: tuple[Tree, Tensor, int | None] | None = field(default=None, repr=False, compare=False)
    name: ClassVar[str] = "program"

    @property
    def outputs(self) -> int:
        return 1

    @property
    def curvature(self) -> float:
        return self.sharpness

    def loss(self, output: Any, y: Tensor) -> Tensor:
        if not isinstance(output, ProgramOutput):
            raise Refusal(
                f"likelihood='program': the module returned {type(output).__name__}; this likelihood is for "
                "confide.models.program, which brings it along"
            )
        return -output.log_likelihoods(y)

    def predictive(self, outputs: Tensor, weights: Tensor) -> Predictive:
        return law_of(outputs, weights)


@dataclass(frozen=True)
class ProgramPrior:
    """The prior that a program brings along, over the unbounded vector."""

    program: Program

    def energy(self, position: Tensor) -> Tensor:
        return -self.program.log_prior(position)

    def add_energy_gradient_(self, position: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        with torch.enable_grad():
            here = position.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(here), here)
        return out.add_(slope, alpha=factor)


def scores_of(program: Program, position: Tensor, x: Tree, y: Tensor) -> tuple[Tensor, Tensor]:
    """For every input and every y: d log p(y | u, x) / d u at the unbounded vector u, and log p itself."""

    def said(at: Tensor, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        found = program.log_likelihood(program.constrained(at), x, y).reshape(())
        return found, found

    of_targets = torch.func.vmap(torch.func.grad(said, has_aux=True), in_dims=(None, None, 0))
    with _unchecked():
        try:
            scores, logs = torch.func.vmap(of_targets, in_dims=(None, 0, None))(position, x, y)
        except RuntimeError:  # a parameter that is looked up by a number of the input, say
            each = [of_targets(position, _row(x, row), y) for row in range(size_of(x))]
            scores, logs = (torch.stack([one[part] for one in each]) for part in (0, 1))
    return scores, logs


def logs_of(program: Program, position: Tensor, x: Any, y: Tensor) -> Tensor:
    """log p(y | u, x) for every y at one input."""
    with _unchecked(), torch.no_grad():
        values = program.constrained(position)
        found: Tensor = torch.vmap(lambda one: program.log_likelihood(values, x, one).reshape(()))(y)
    return found


def logs_at(program: Program, position: Tensor, x: Tree, y: Tensor) -> Tensor:
    """log p(y | u, x) for every input and every y, as a function of u; all at once, or it raises."""

    def said(values: Values, x: Any, y: Tensor) -> Tensor:
        return program.log_likelihood(values, x, y).reshape(())

    of_targets = torch.func.vmap(said, in_dims=(None, None, 0))
    with _unchecked():
        found: Tensor = torch.func.vmap(of_targets, in_dims=(None, 0, None))(program.constrained(position), x, y)
    return found


def used_names(program: Program, x: Any, y: Tensor) -> set[str]:
    """Names of the parameters that the log-likelihood of one record is a function of, where the program stands."""
    with _unchecked(), torch.enable_grad():
        values = program.constrained(program.unconstrained.detach())
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        found = program.log_likelihood(leaves, x, y).sum()
        slopes = torch.autograd.grad(found, list(leaves.values()), allow_unused=True)
    return {name for name, slope in zip(leaves, slopes, strict=True) if slope is not None}


def said_of(program: Program, x: Any, y: Tensor) -> Tensor:
    """log p(y | u, x) of one record where the program stands."""
    with _unchecked(), torch.no_grad():
        return program.log_likelihood(program.constrained(program.unconstrained), x, y)


def hessian_of(program: Program, position: Tensor, x: Any, y: Tensor) -> Tensor:
    """d^2 log p(y | u, x) / d u^2 of one record."""

    def said(at: Tensor) -> Tensor:
        return program.log_likelihood(program.constrained(at), x, y).reshape(())

    with _unchecked():
        found: Tensor = torch.func.jacrev(torch.func.grad(said))(position)
    return found


def named_draws(module: nn.Module, draws: Tensor) -> dict[str, Tensor]:
    """Draws of the flat vector by parameter name, (draws, *shape); those of a program in their supports."""
    if isinstance(module, Program):
        return module.named_draws(draws)
    return {name: draws[:, part].reshape(-1, *shape) for name, (part, shape) in named_slices(module).items()}


def record_tree(x: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Tree:
    """Inputs as they were given to a module: one tensor, several, or by name."""
    if named:
        return dict(named)
    return x[0] if len(x) == 1 else x


# how it is laid out -----------------------------------------------------------------------------------------------


def _laid_out(parameters: Mapping[str, PriorLaw], start: Mapping[str, Any]) -> tuple[tuple[Part, ...], list[Tensor]]:
    """The parts of the unbounded vector, and where each starts."""
    parts: list[Part] = []
    values: list[Tensor] = []
    before: dict[str, Tensor] = {}
    first = 0
    for name, prior in parameters.items():
        law = _law(name, prior, before)
        shape = law.batch_shape + law.event_shape
        try:
            to_support = biject_to(law.support)
        except NotImplementedError:
            raise Refusal(
                f"parameters={name!r}: no smooth map leads to the support {law.support} of its prior; a parameter that "
                "takes few values must be summed out in the log-likelihood"
            ) from None
        unbounded = torch.Size(to_support.inverse_shape(shape))
        free = _free_start(name, law, to_support, shape, unbounded, start.get(name))
        where = slice(first, first + unbounded.numel())
        parts.append(Part(name, _unvalidated(prior), shape, unbounded, where, str(law.support)))
        values.append(free)
        before[name] = to_support(free)
        first = where.stop
    return tuple(parts), values


def _unvalidated(prior: PriorLaw) -> PriorLaw:
    """A law as it is, without its checks of values, which it keeps from when it was made (see `_unchecked`)."""
    if not isinstance(prior, Distribution):
        return prior
    found = copy.copy(prior)
    found._validate_args = False
    for inner in ("base_dist", "_component_distribution", "_mixture_distribution"):
        if isinstance(getattr(found, inner, None), Distribution):
            setattr(found, inner, _unvalidated(getattr(found, inner)))
    return found


def _law(name: str, prior: Any, before: Values) -> Distribution:
    if not isinstance(name, str) or not name:
        raise Refusal(f"parameters={name!r}: a parameter needs a name")
    law = prior if isinstance(prior, Distribution) or not callable(prior) else prior(before)
    if not isinstance(law, Distribution):
        raise Refusal(
            f"parameters={name!r}: {type(law).__name__} is no prior; use one of torch.distributions, or a function of "
            "the parameters before it that gives one"
        )
    return law


def _free_start(
    name: str, law: Distribution, to_support: Any, shape: torch.Size, unbounded: torch.Size, given: Any
) -> Tensor:
    """Where a parameter starts on the unbounded side: at what was given, at its prior's mean, or in the middle."""
    dtype = torch.get_default_dtype()
    if given is not None:
        value = torch.as_tensor(given, dtype=dtype).expand(shape)
        free: Tensor = to_support.inv(value).reshape(unbounded)
        if not torch.isfinite(free).all():
            raise Refusal(f"start={name!r}: its values are not inside of the support {law.support}")
        return free.to(dtype).clone()
    try:
        free = to_support.inv(law.mean.expand(shape)).reshape(unbounded)
    except NotImplementedError:  # a law whose mean torch does not know
        return torch.zeros(unbounded, dtype=dtype)
    return torch.where(torch.isfinite(free), free, torch.zeros_like(free)).to(dtype)


def _check_function(argument: str, function: Any, count: int) -> None:
    if isinstance(function, nn.Module) or not callable(function):
        raise Refusal(
            f"{argument}={function!r}: must be a function of named parameters and one record; a network goes to "
            "confide.fit itself"
        )
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        takes = "(parameters, x, y)" if count == 3 else "(parameters, x)"
        raise Refusal(f"{argument}: must take {takes}") from None
    except ValueError:
        return  # one that does not say what it takes


# one record after the other, or all together ----------------------------------------------------------------------


def _row(tree: Any, row: int) -> Any:
    return map_tensors(lambda tensor: tensor[row], tree)


def _for_each(function: Callable[[Any], Any], tree: Any) -> Any:
    """The function of every row, stacked: all at once where torch's vmap can, else one after the other."""
    try:
        return torch.vmap(function)(tree)
    except Exception:  # a branch on values, say; an error of the function itself comes up again
        found = [function(_row(tree, row)) for row in range(size_of(tree))]
    if not found:
        raise Refusal("x: must hold at least one input")
    if isinstance(found[0], dict):
        return {name: torch.stack([one[name] for one in found]) for name in found[0]}
    return torch.stack(found)


class _Checks:
    """How many are inside of `_unchecked`, in all threads, and what torch was set to before the first."""

    lock: ClassVar[threading.RLock] = threading.RLock()
    inside: ClassVar[int] = 0
    before: ClassVar[bool] = True


@contextmanager
def _unchecked() -> Iterator[None]:
    """torch.distributions without its checks of arguments: they branch on values, which no isolated record may do.

    What they would have refused has no finite density, so that its record counts as zero.
    """
    with _Checks.lock:
        if _Checks.inside == 0:
            _Checks.before = Distribution._validate_args
            Distribution.set_default_validate_args(False)
        _Checks.inside += 1
    try:
        yield
    finally:
        with _Checks.lock:
            _Checks.inside -= 1
            if _Checks.inside == 0:
                Distribution.set_default_validate_args(_Checks.before)
