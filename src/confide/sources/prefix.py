"""Networks whose first part is frozen: what that part gives for a record is computed once and kept behind the boundary.

Any module may have such a part: a frozen encoder under a trainable head, frozen blocks before others. It is taken
apart on made-up records, and only where that can be shown to change nothing:

- frozen    the outermost parts without a trainable parameter that are called once and give tensors, records first
- first     the network is run with its trainable parameters on torch's `meta` device, where tensors have no values: a
            part that still gives the same numbers, bit by bit, cannot depend on them
- fixed     no random number is drawn while the part runs, nothing listens to it, and its parameters, buffers and modes
            are what they were; the code before it cannot branch on a record, since vmap has run it
- worth it  the frozen parts have half of the multiplications or more, and by the plan a run is spared enough of them

Whatever else there is runs whole at every step, as before. Privacy does not rest on any of this: what is kept for a
record was computed from that record alone (`isolated_rows`), and every answer is clipped as always.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from confide.data import trees
from confide.data.trees import Tree
from confide.devices import moved
from confide.mechanism.clipping.proven import listens
from confide.mechanism.clipping.statistics import rows_at_once
from confide.models.flat import copied
from confide.sources.queries import GradientQuery

WORTH = 2e10  # multiplications that a run must be spared: about a second of one processor, the price of looking


class Given(nn.Module):
    """Stands in the place of a frozen part and gives what was kept of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []  # empty but for one call, so that nothing of a record stays

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.kept[-1]


class Tapped(nn.Module):
    """A frozen part that notes what it gives."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.seen: list[Any] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        found = self.part(*inputs, **named)
        self.seen.append(found)
        return found


@dataclass(frozen=True)
class Shape:
    """Of what one part gives: its structure with everything that is no tensor, and the tensors' sizes for a record."""

    structure: Any
    leaves: tuple[Any, ...]
    sizes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, found: Any, records: int, dtype: torch.dtype) -> Shape | None:
        leaves, structure = pytree.tree_flatten(found)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        plain = all(isinstance(leaf, Tensor | bool | int | float | str | None) for leaf in leaves)
        fit = all(tensor.dtype == dtype and tensor.dim() and len(tensor) == records for tensor in tensors)
        if not (tensors and plain and fit):
            return None
        marked = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(structure, marked, tuple(tensor.shape[1:] for tensor in tensors))

    @property
    def width(self) -> int:
        return sum(size.numel() for size in self.sizes)

    def rebuilt(self, row: Tensor) -> Any:
        """The part's output, of (records, width)."""
        pieces = iter(row.split([size.numel() for size in self.sizes], 1))
        shapes = iter(self.sizes)
        leaves = [next(pieces).reshape(-1, *next(shapes)) if leaf is Tensor else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)


class TappedForDraws(Tapped):
    """Notes as well whether random numbers were drawn, on the host or on the part's device."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__(part)
        self.draws = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        before = self._states()
        found = super().forward(*inputs, **named)
        self.draws |= not all(map(torch.equal, before, self._states()))
        return found

    def _states(self) -> list[Tensor]:
        places = {value.device.type for value in self.part.parameters()} - {"cpu"}
        return [torch.get_rng_state(), *(torch.get_device_module(place).get_rng_state() for place in places)]


class Suffix(nn.Module):
    """The network as a function of what its frozen parts gave and of the record, whose tensors come one by one."""

    def __init__(
        self, module: nn.Module, places: dict[str, Shape], names: tuple[str, ...] | None, single: bool
    ) -> None:
        super().__init__()
        self.given = {name: Given() for name in places}
        self.module = grafted(module, self.given)
        self.shapes, self.names, self.single = list(places.values()), names, single

    def forward(self, kept: Tensor, *inputs: Tensor) -> Any:
        rows = kept.split([shape.width for shape in self.shapes], 1)
        for given, shape, row in zip(self.given.values(), self.shapes, rows, strict=True):
            given.kept.append(shape.rebuilt(row))
        record: Any = inputs[0] if self.single else inputs
        try:
            return trees.called(
                self.module, record if self.names is None else dict(zip(self.names, inputs, strict=True))
            )
        finally:
            for given in self.given.values():
                given.kept.clear()


def grafted(module: nn.Module, parts: dict[str, Any]) -> nn.Module:
    """The module with other parts in some places; everything else, parameters too, is the module's own."""
    found = copy.copy(module)
    found._modules = dict(module._modules)
    for name in {place.split(".")[0] for place in parts}:
        child = module._modules[name]
        inner = {place[len(name) + 1 :]: part for place, part in parts.items() if place.split(".")[0] == name}
        assert child is not None
        found._modules[name] = inner[""] if "" in inner else grafted(child, inner)
    return found


class Prefix:
    """The frozen first parts of a query's network, and what of the network is left when they are known."""

    def __init__(self, module: nn.Module, places: dict[str, Shape], x: Tree) -> None:
        self.module, self.places = module, places
        self.tapped = {name: Tapped(module.get_submodule(name)) for name in places}
        self.whole = grafted(module, self.tapped)
        self.width = sum(shape.width for shape in places.values())
        self.rest = _rest_of_chain(module, list(places))
        if self.rest is None:
            self.suffix: nn.Module = Suffix(
                module, places, tuple(x) if isinstance(x, dict) else None, isinstance(x, Tensor)
            )
        else:
            self.suffix = nn.Sequential(*self.rest)
        self.fixed = self._state()

    def holds(self, query: GradientQuery) -> bool:
        """Whether the query is about this network and the frozen parts are as they were."""
        return query.module is self.module and self._state() == self.fixed

    def _state(self) -> tuple[Any, ...]:
        parts = [tapped.part for tapped in self.tapped.values()]
        values = [value for part in parts for value in (*part.parameters(), *part.buffers())]
        layers = [layer for part in parts for layer in part.modules()]
        same = tuple((id(value), value._version, value.requires_grad) for value in values)
        return same, tuple((id(layer), layer.training, listens(layer)) for layer in layers)

    def records(self, kept: Tensor, x: Callable[[], Tree]) -> Tree:
        """What the rest of the network is called with."""
        if self.rest is not None:
            found: Tensor = next(reversed(self.places.values())).rebuilt(kept)
            return found
        return kept, *trees.tensors_in(x())

    def rows(self, x: Any) -> Tensor:
        """What the parts give for these records, beside each other: (records, width)."""
        try:
            trees.called(self.whole, x)
            found = [leaf for tapped in self.tapped.values() for leaf in trees.tensors_in(tapped.seen[0])]
            return torch.cat([leaf.flatten(1) for leaf in found], 1)
        finally:
            for tapped in self.tapped.values():
                tapped.seen.clear()


def _rest_of_chain(module: nn.Module, places: Sequence[str]) -> list[nn.Module] | None:
    """What follows the one part of a plain chain, which needs nothing but that part's output; None for all others."""
    names = list(module._modules)
    if type(module) is not nn.Sequential or listens(module) or len(places) != 1 or places[0] not in names:
        return None
    return list(module)[names.index(places[0]) + 1 :]


def prefix_of(query: Any, x: Tree) -> Prefix | None:
    """The frozen first parts of the query's network, found on made-up records; None where nothing could be shown."""
    if not isinstance(query, GradientQuery) or query.origin is None:
        return None
    again = _times_again(query)
    parts = [query.module.get_submodule(name) for name in outermost_frozen(query.module)]
    if again * sum(value.numel() for part in parts for value in part.parameters()) < WORTH / 20:
        return None  # few weights: a look would take longer than all of their products
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return _examined(query, moved(trees.in_type(x, query.inputs), query.device), again)
    except Exception:  # what cannot be taken apart runs whole, and says there what is wrong with it
        return None


def plan_of(query: GradientQuery) -> Any:
    """Of the run that asks; None where nobody says what run that is."""
    return getattr(getattr(query.origin, "problem", None), "plan", None)


def _times_again(query: GradientQuery) -> float:
    """How often a record is used in the planned run after its first time, added up over all records."""
    plan = plan_of(query)
    if plan is None:
        return 0.0
    uses = sum(mechanism.rate * steps for mechanism, steps in plan.blocks)
    return float(plan.records * max(0.0, uses - 1))


def outermost_frozen(module: nn.Module, before: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        trainable = [value.requires_grad for value in child.parameters()]
        if any(trainable):
            yield from outermost_frozen(child, f"{before}{name}.")
        elif trainable and not any(_changes(layer) for layer in child.modules()):
            yield f"{before}{name}"


def _changes(layer: nn.Module) -> bool:
    """Whether somebody listens to a layer, or it is one of confide's, whose draws change between steps."""
    return listens(layer) or type(layer).__module__.startswith("confide.")


def _examined(query: GradientQuery, x: Any, again: float) -> Prefix | None:
    trial = copied(query.module)  # what user code leaves behind is left behind there
    places, products = _blind_parts(trial, x, query.inputs)
    chain = [name for name in places if _rest_of_chain(trial, [name]) is not None]
    if chain and len(chain) == len(places):  # the last of them is all that the others are for
        places = {chain[-1]: places[chain[-1]]}
    if not places:
        return None
    apart = Prefix(trial, places, x)
    kept = apart.rows(x)
    rest: list[Any] = []
    state = torch.get_rng_state()  # for the rest, which may drop what it likes
    left = _products(lambda: rest.append(trees.called(apart.suffix, apart.records(kept, lambda: x))))
    torch.set_rng_state(state)
    spared = products - left
    enough = spared >= products / 2 and again * spared >= WORTH * trees.size_of(x)
    if not (enough and _same(rest[0], trees.called(trial, x))):
        return None
    found = Prefix(query.module, places, x)
    blank = torch.zeros(trees.size_of(x), device=query.device)
    rows_at_once(lambda one, _: found.rows(one), x, blank, found.width)  # raises where a record decides what runs
    return found


def _blind_parts(trial: nn.Module, x: Any, dtype: torch.dtype) -> tuple[dict[str, Shape], int]:
    """The frozen parts that run once and do not know the trainable parameters, in the order of their calls, and the
    multiplications of the whole network."""
    parts = {name: TappedForDraws(trial.get_submodule(name)) for name in outermost_frozen(trial)}
    whole = grafted(trial, parts)
    absent = {
        name: torch.empty_like(value, device="meta") for name, value in trial.named_parameters() if value.requires_grad
    }
    with contextlib.suppress(Exception):  # the first operation between a value and none
        trees.called(lambda *inputs, **named: functional_call(whole, absent, inputs, named), x)
    blind = {name: part.seen[:] for name, part in parts.items()}
    for part in parts.values():
        part.seen.clear()
    products = _products(lambda: trees.called(whole, x))
    found = {}
    for name, part in parts.items():
        once = len(blind[name]) == len(part.seen) == 1 and not part.draws
        shape = Shape.of(part.seen[0], trees.size_of(x), dtype) if once and _same(blind[name], part.seen) else None
        if shape is not None:
            found[name] = shape
    return found, products


def _same(one: Any, other: Any) -> bool:
    """Whether two outputs have the same numbers, bit by bit, and are numbers at all."""
    first, second = trees.tensors_in(one), trees.tensors_in(other)
    pairs = list(zip(first, second, strict=True))
    return bool(pairs) and all(a.device == b.device and torch.equal(a, b) for a, b in pairs)


def _products(run: Callable[[], Any]) -> int:
    """Multiplications and additions of the products in a run."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())
