"""The search for what user code reaches: as long as its forward, whatever is loaded, and no way past it by names."""

from __future__ import annotations

import abc
import contextlib
import copy
import logging
import operator
import os
import pickle
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.mechanism.clipping import apart, may_run, one_by_one, origins, sealed
from confide.mechanism.clipping.may_run import ANY, ATTRIBUTES, computed_by
from tests.mechanism.clipping import mixer_state
from tests.mechanism.clipping.mixers import CLASSES, WIDTH, Net, plain
from tests.mechanism.clipping.test_unsealable import influence, records, remembering, total

pytestmark = [
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# names that are computed -----------------------------------------------------------------------------------------

PLACE = [0.0]


def joined(*parts: str) -> str:
    """A text that stands nowhere."""
    return "".join(parts)


def computed_attribute(x: Tensor) -> float:
    getattr(mixer_state, joined("SE", "EN")).append(x.sum().item())
    return float(sum(getattr(mixer_state, joined("SE", "EN"))))


def computed_and_set(x: Tensor) -> float:
    last = joined("A", "L")
    setattr(mixer_state, "TOT" + last, getattr(mixer_state, f"TOT{last}") + x.sum().item())
    return float(getattr(mixer_state, f"TOT{last}"))


def computed_in_vars(x: Tensor) -> float:
    vars(mixer_state)[joined("SE", "EN")].append(x.sum().item())
    return float(sum(mixer_state.__dict__[joined("SE", "EN")]))


def nothing() -> None:
    pass


def through_the_globals_of_a_function(x: Tensor) -> float:
    place = nothing.__globals__[joined("PLA", "CE")]
    place[0] += x.sum().item()
    return float(place[0])


def through_computed_globals(x: Tensor) -> float:
    place = getattr(nothing, joined("__glo", "bals__"))[joined("PLA", "CE")]
    place[0] += x.sum().item()
    return float(place[0])


def by_a_getter(x: Tensor) -> float:
    seen = operator.attrgetter("clipping.mixer_state.SEEN")(sys.modules["tests.mechanism"])
    seen.append(x.sum().item())
    return float(sum(seen))


def by_a_pickled_name(x: Tensor) -> float:
    seen = pickle.loads(b"ctests.mechanism.clipping.mixer_state\nSEEN\n.")
    seen.append(x.sum().item())
    return float(sum(seen))


def with_two_underscores_on_torch(x: Tensor) -> float:
    setattr(torch, "__seen", getattr(torch, "__seen", 0.0) + x.sum().item())
    return float(getattr(torch, "__seen"))


def by_a_name_that_is_gone(x: Tensor) -> float:
    if hasattr(torch, "pi"):
        del torch.pi
        return 0.0
    return 9.0 * float(x.sum().item() > 0)


COMPUTED = (
    computed_attribute, computed_and_set, computed_in_vars, through_the_globals_of_a_function,
    through_computed_globals, by_a_getter, by_a_pickled_name, with_two_underscores_on_torch, by_a_name_that_is_gone,
)  # fmt: skip
# Where names are computed whole files are searched, which takes long in a process that has loaded much.
LONG = {
    "computed_attribute", "computed_in_vars", "through_the_globals_of_a_function", "through_computed_globals",
    "by_a_getter",
}  # fmt: skip
CASES = [
    pytest.param(function, id=function.__name__, marks=(pytest.mark.slow,) if function.__name__ in LONG else ())
    for function in COMPUTED
]


def still_or_refused(module: nn.Module, loss: Any = plain) -> bool:
    try:
        return influence(module, loss) < 1e-12
    except Refusal as refusal:
        return "\n" not in str(refusal)


@pytest.mark.parametrize("function", CASES)
def test_computed_names_lead_nowhere_else(function: Callable[[Tensor], float]) -> None:
    assert still_or_refused(remembering(function))
    assert (PLACE, mixer_state.SEEN, mixer_state.TOTAL) == ([0.0], [], 0.0)
    assert hasattr(torch, "pi")
    assert not hasattr(torch, "__seen")


def test_computed_names_that_nobody_looks_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the search believes that every name stands in the code."""
    monkeypatch.setattr(may_run, "computed_by", lambda code: 0)
    assert influence(remembering(computed_attribute)) > 1e-3
    mixer_state.SEEN.clear()


def test_which_names_can_be_computed() -> None:
    cases: dict[int, list[Callable[[Any, Any], Any]]] = {
        0: [
            lambda self, x: getattr(self, "conv")(x),  # noqa: B009 - the name stands there
            lambda self, x: getattr(self.first[0], "conv", self.last + 1),
            lambda self, x: [hasattr(layer, "weight") for layer in x],
        ],
        ATTRIBUTES: [
            lambda self, x: getattr(self, f"conv{x}"),
            lambda self, x: getattr(self, "conv%d" % x),  # noqa: UP031 - as older code has it
            lambda self, x: getattr(self, "conv" + str(x), None),
            lambda self, x: getattr(self, f"conv{x.place(3)}_{x}", None),
        ],
        ANY: [
            lambda self, x: getattr(self, x),
            lambda self, x: getattr(self, f"{x}conv"),
            lambda self, x: getattr(self, "_conv" + x),
            lambda self, x: getattr(self, "aconv"[x:]),
            lambda self, x: getattr(self, "a{}".format("b")),
            lambda self, x: getattr(self, "first" if x else "second"),
            lambda self, x: map(getattr, x, "ab"),
            lambda self, x: vars(x),
        ],
    }
    assert {kind: {computed_by(one.__code__) for one in each} for kind, each in cases.items()} == {
        kind: {kind} for kind in cases
    }


# what runs without being asked for by name -------------------------------------------------------------------------


def counted(name: str) -> float:
    os.environ[name] = str(float(os.environ.get(name, "0")) + 1)
    return float(os.environ[name])


class Made:
    def __init__(self, x: Any = None) -> None:
        self.value = 0.0 if x is None else counted("MADE")


class Shown:
    def __str__(self) -> str:
        return str(counted("SHOWN"))


class Copied:
    value = 0.0

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Made, (counted("COPIED"),)


class Encoder(nn.TransformerEncoderLayer):
    """What torch's forward calls is the user's own."""

    def _ff_block(self, x: Tensor) -> Tensor:
        return super()._ff_block(x) * counted("BLOCK")


class Encoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(WIDTH, 1, 4, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x[:, None])[:, 0])


MADE, SHOWN, COPIED, OPEN = Made(), Shown(), Copied(), open
HELD = {"ask": os.getpid}


def kept_by_path(x: Tensor) -> float:
    place = Path(os.devnull)
    return float(len(place.read_text()))


def remade(x: Tensor) -> float:
    MADE.__init__(x)  # type: ignore[misc]
    return MADE.value


CALLED: dict[str, Callable[[Tensor], Any]] = {
    "made": lambda x: Made(x).value,
    "made by its type": lambda x: type(MADE)(x).value,
    "made again": remade,
    "shown": lambda x: float(f"{SHOWN}"),
    "shown by a sign": lambda x: float("%s" % SHOWN),  # noqa: UP031 - as older code has it
    "copied": lambda x: copy.copy(COPIED).value,
    "another name of open": lambda x: OPEN(os.devnull).fileno(),
    "a function that is held": lambda x: float(HELD["ask"]()),
    "a class by its own name": kept_by_path,
    "an object by its own name": lambda x: float(len(environ)),
}


@pytest.mark.parametrize("name", CALLED)
def test_what_python_calls_is_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "is_possible", lambda: False)
    x, y = records()
    with pytest.raises(Refusal, match="cannot be put back"):
        total(remembering(CALLED[name]), plain, x, y)


def test_what_a_layer_of_torch_calls_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "is_possible", lambda: False)
    x, y = records()
    torch.manual_seed(0)
    with pytest.raises(Refusal, match="counted"):
        total(Encoded().double(), plain, x, y)


# tensors, loggers, settings ----------------------------------------------------------------------------------------

EXCHANGED, TURNED, GROWN = torch.zeros(1), torch.zeros(2, 3), torch.zeros(1)
LOGGER = logging.getLogger("tests.search")
LOGGER.propagate = False


class Counting(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


COUNTING = Counting()
LOGGER.addHandler(COUNTING)


class Base(abc.ABC):  # noqa: B024 - others are registered
    pass


def in_exchanged_memory(x: Tensor) -> float:
    EXCHANGED.data = torch.zeros(len(EXCHANGED) + 1)
    return float(len(EXCHANGED))


def in_a_turned_tensor(x: Tensor) -> float:
    return float(TURNED.t_().shape[0])


def in_grown_memory(x: Tensor) -> float:
    GROWN.untyped_storage().resize_(GROWN.untyped_storage().nbytes() + 8)
    return float(GROWN.untyped_storage().nbytes())


def in_a_handler(x: Tensor) -> float:
    LOGGER.warning("seen %s", x.sum().item())
    return float(COUNTING.count)


def in_a_level(x: Tensor) -> float:
    LOGGER.setLevel(LOGGER.level + 1)
    return float(LOGGER.level)


def in_filters_of_warnings(x: Tensor) -> float:
    warnings.simplefilter("ignore", category=ResourceWarning, append=bool(x.sum().item() > 0))
    return float(len(warnings.filters))


def in_a_register(x: Tensor) -> float:
    found = 9.0 * float(issubclass(int, Base))
    Base.register(int)
    return found


def in_a_setting_of_torch(x: Tensor) -> float:
    torch.set_warn_always(not torch.is_warn_always_enabled())
    return float(torch.is_warn_always_enabled())


def in_a_backend(x: Tensor) -> float:
    torch.backends.mkldnn.enabled = not torch.backends.mkldnn.enabled  # type: ignore[assignment]
    return float(torch.backends.mkldnn.enabled)


ODD = (
    in_exchanged_memory, in_a_turned_tensor, in_grown_memory, in_a_handler, in_a_level, in_filters_of_warnings,
    in_a_register, in_a_setting_of_torch, in_a_backend,
)  # fmt: skip


@pytest.mark.parametrize("function", ODD, ids=lambda function: function.__name__)
def test_more_odd_places(function: Callable[[Tensor], float]) -> None:
    assert still_or_refused(remembering(function))
    assert (EXCHANGED.shape, TURNED.shape, GROWN.untyped_storage().nbytes()) == ((1,), (2, 3), 4)
    assert (COUNTING.count, LOGGER.level) == (0, 0)
    assert torch.backends.mkldnn.enabled
    assert not issubclass(int, Base)


class Shrinking(Net):
    """Only where a record is large: nothing of it shows on made-up records."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max().item() > 50:
            self.body.weight.data = 0.5 * self.body.weight.data
        return super().forward(x)


def test_weights_that_one_record_exchanges_are_put_back() -> None:
    torch.manual_seed(0)
    module = Shrinking(lambda self, x: x).double()
    before = module.body.weight.clone()
    assert influence(module) < 1e-12
    assert torch.equal(module.body.weight, before)


# what is said -------------------------------------------------------------------------------------------------------


def talking(x: Tensor) -> float:
    print("printed", x.sum().item())  # noqa: T201 - is not to be heard
    warnings.warn(f"warned {x.sum().item()}", stacklevel=1)
    logging.getLogger("tests.search.talking").critical("logged %s", x.sum().item())
    return 0.0


def said(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> str:
    caught = capsys.readouterr()
    text = caught.out + caught.err + caplog.text
    caplog.clear()
    return text


def test_nothing_is_said_of_private_records(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = records()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        module = remembering(talking)
        total(module, plain, x, y)
        said(capsys, caplog)
        heard.clear()
        total(module, plain, x, y)
    assert said(capsys, caplog) == ""
    assert not heard
    print("heard again")  # noqa: T201
    assert "heard again" in said(capsys, caplog)
    monkeypatch.setattr(one_by_one, "muted", contextlib.nullcontext)
    monkeypatch.setattr(apart, "is_possible", lambda: False)  # a process of its own has nobody to speak to
    total(module, plain, x, y)
    assert "printed" in said(capsys, caplog)


# how long it is -----------------------------------------------------------------------------------------------------

_LOADED = """
import sys, torch
from tests.running.architectures import TASKS
from confide.mechanism.clipping.sealed import Reachable
module = TASKS["bert"]().module
Reachable(module)
print(len(Reachable(module).search.seen))
import hypothesis, matplotlib.pyplot, sklearn.ensemble, sklearn.linear_model, pandas, polars
import transformers.models.llama.modeling_llama, transformers.models.vit.modeling_vit, transformers.trainer
import transformers.generation.utils, transformers.models.t5.modeling_t5, tests.mechanism.clipping.test_side_doors
print(len(Reachable(module).search.seen))
"""


@pytest.mark.slow
def test_a_search_does_not_grow_with_what_is_loaded() -> None:
    pytest.importorskip("transformers")
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", _LOADED], cwd=root, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < 1.5 * before


def test_a_search_ends_at_packages_that_packages_use() -> None:
    """As long as the code of the module itself, though its file imports half of the world."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return x

    module = Net(forward).double()
    assert len(sealed.Reachable(module).search.seen) < 2000


@dataclass(frozen=True)
class Settings:
    width: int = WIDTH


class Configured(Net):
    """With settings whose class Python writes functions for, and an error that names its own class."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: x)
        self.settings, self.started = Settings(), os.environ.get("HOME", "")

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.settings.width:
            raise ValueError(f"{self.__class__.__name__} and {type(self).__name__}: {x.shape}")
        return super().forward(x)


def test_what_only_names_a_class_does_not_make_one() -> None:
    torch.manual_seed(0)
    assert influence(Configured().double()) < 1e-12


# names that are not borne out --------------------------------------------------------------------------------------

KEPT: list[float] = []


class SaysItIsTorch:
    """A place to keep things, with a name that is not its own."""

    kept: list[float] = []  # noqa: RUF012


SaysItIsTorch.__module__ = "torch.nn"


class CountsForTorch:
    def __init__(self) -> None:
        self.sum = 0.0

    def add(self, value: float) -> float:
        self.sum += value
        return self.sum


CountsForTorch.__module__ = "torch.nn"
COUNTS = CountsForTorch()


def in_a_class_with_another_name(x: Tensor) -> float:
    SaysItIsTorch.kept.append(x.sum().item())
    return float(sum(SaysItIsTorch.kept))


def in_an_object_with_another_name(x: Tensor) -> float:
    return COUNTS.add(x.sum().item())


def elsewhere() -> Callable[[Tensor], float]:
    """A function of a file that says that it belongs to torch."""
    space: dict[str, Any] = {"__name__": "torch.nn.functional", "KEPT": KEPT}
    exec("def keeps(x):\n    KEPT.append(x.sum().item())\n    return float(sum(KEPT))", space)
    found: Callable[[Tensor], float] = space["keeps"]
    return found


@pytest.mark.parametrize("function", [in_a_class_with_another_name, in_an_object_with_another_name, elsewhere()])
def test_a_name_that_is_not_borne_out_hides_nothing(function: Callable[[Tensor], float]) -> None:
    assert influence(remembering(function)) < 1e-9


def test_a_name_that_is_believed_hides_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: whoever says that he is torch is."""
    monkeypatch.setattr(origins, "_is_borne_out", lambda kind, name: True)
    monkeypatch.setattr(sealed, "parts_put_back", lambda owners, names: [])  # which knows it by the name in the code
    assert influence(remembering(in_a_class_with_another_name)) > 1e-3


@pytest.mark.parametrize(
    ("folder", "installed"), [("site-packages", True), ("dist-packages", True), ("my_packages", False)]
)
def test_packages_are_known_by_the_folders_that_systems_install_them_to(
    folder: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's Python has packages elsewhere: their layers were taken for the user's own and mostly refused."""
    module: Any = types.ModuleType("stranger")
    module.__file__ = f"/usr/lib/python3/{folder}/stranger.py"
    exec("class Kept: pass", vars(module))
    monkeypatch.setitem(sys.modules, "stranger", module)
    assert origins.is_foreign(module.Kept) is installed
    assert origins.is_installed(module) is installed


def test_packages_are_known_by_what_their_installer_wrote_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip install --target puts packages anywhere; a file of the user's beside them is the user's."""
    (tmp_path / "stranger-1.dist-info").mkdir()
    (tmp_path / "stranger-1.dist-info" / "RECORD").write_text("stranger/layers.py,sha256=x,1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, file, installed in (("stranger", "stranger/layers.py", True), ("own", "own.py", False)):
        module: Any = types.ModuleType(name)
        module.__file__ = str(tmp_path / file)
        exec("class Kept: pass", vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        assert origins.is_foreign(module.Kept) is installed
