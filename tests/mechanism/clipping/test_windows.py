"""What user code must not look through while records run: frames, profiles, settings that lie, loggers left silent."""

from __future__ import annotations

import logging
import threading
import traceback
from contextlib import nullcontext
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import rdp
from torch import Tensor, nn

from confide.errors import Refusal
from confide.mechanism.clipping import muted, statistics
from confide.mechanism.clipping.proven import is_proven, is_proven_loss
from confide.mechanism.clipping.sealed import Reachable
from confide.mechanism.clipping.statistics import isolated_rows
from confide.mechanism.clipping.unsealable import loose_part
from confide.mechanism.clipping.watched import looked_after, watched
from confide.models.likelihoods import Gaussian
from confide.privacy.accountants import rdp as our_rdp
from confide.sources.records import as_weights
from tests.mechanism.clipping.corpus_built import Liar


def _of_a_generator() -> Any:
    def steps() -> Any:
        yield 1

    return getattr(steps(), "_".join(("gi", "frame")))


def _of_an_error() -> Any:
    try:
        raise KeyError
    except KeyError as error:
        return getattr(error.__traceback__, "_".join(("tb", "frame")))


def _shown() -> Any:
    return traceback.StackSummary.extract(traceback.walk_stack(None), capture_locals=True)


def _everything() -> Any:
    return __import__("gc").get_objects()


@pytest.mark.parametrize("way", [_of_a_generator, _of_an_error, _shown, _everything], ids=lambda way: way.__name__)
@pytest.mark.parametrize("watch", [looked_after, watched], ids=lambda watch: watch.__name__)
def test_frames_and_objects_of_others_are_out_of_reach(way: Any, watch: Any) -> None:
    """Whatever the names are put together from."""
    assert way() is not None
    with watch(), pytest.raises(Refusal, match="records of others"):
        way()
    assert way() is not None


def test_a_function_of_a_source_is_no_question_by_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a source asks of one record is made inside a function; a name that says so can be written anywhere."""

    def made() -> None: ...

    monkeypatch.setattr(made, "__module__", "confide.sources.features")
    assert loose_part(made) == ""
    monkeypatch.setattr(as_weights, "__qualname__", "found.<locals>.asked")
    assert loose_part(as_weights) == "confide.sources.records.as_weights"


def test_packages_may_ask_who_called() -> None:
    with looked_after():
        torch.manual_seed(0)  # torch writes down from where
        logging.getLogger("confide.test").findCaller()


def test_settings_that_lie_are_not_believed() -> None:
    x = torch.zeros(5, 3)
    softmax: Any = nn.Softmax(dim=1)
    assert is_proven(nn.Sequential(softmax), x)
    softmax.dim = Liar(0)
    assert softmax.dim % 2 == 1, "what would be believed"
    assert not is_proven(nn.Sequential(softmax), x)
    norm: Any = nn.LayerNorm(3)
    norm.normalized_shape = type("Short", (tuple,), {"__len__": lambda self: 1})((5, 3))
    assert not is_proven(nn.Sequential(norm), x)


def test_a_likelihood_with_a_setting_that_watches_is_not_believed() -> None:
    class Watching(Tensor): ...

    likelihood, y = Gaussian(0.5), torch.zeros(3)
    assert is_proven_loss(likelihood.loss, y)
    object.__setattr__(likelihood, "noise_scale", torch.tensor(0.5).as_subclass(Watching))
    assert not is_proven_loss(likelihood.loss, y)


def test_a_logger_that_was_put_back_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    """It remembers which levels are heard, and would stay silent."""
    logger = logging.getLogger("confide.tests.heard")
    seal = Reachable(logger)
    logger.setLevel(logging.CRITICAL)
    logger.warning("not heard")
    seal.restore()
    logger.warning("heard")
    assert [record.message for record in caplog.records] == ["heard"]


def _at_once(*works: Any) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_that_are_silent_one_inside_the_other_leave_logging_on() -> None:
    begun, left = threading.Event(), threading.Event()
    before = logging.root.manager.disable

    def first() -> None:
        with muted.muted():
            begun.wait()
        left.set()

    def second() -> None:
        with muted.muted():
            begun.set()
            left.wait()

    _at_once(first, second)
    assert logging.root.manager.disable == before


def test_threads_that_quieten_a_package_leave_it_heard(caplog: pytest.LogCaptureFixture) -> None:
    begun, left = threading.Event(), threading.Event()

    def first() -> None:
        with our_rdp._quiet():
            begun.wait()
        left.set()

    def second() -> None:
        with our_rdp._quiet():
            begun.set()
            left.wait()

    caplog.set_level(logging.WARNING, logger="absl")
    _at_once(first, second)
    small = dp_accounting.PoissonSampledDpEvent(0.37, dp_accounting.GaussianDpEvent(0.31))
    with our_rdp._quiet():
        rdp.RdpAccountant().compose(small)
    assert not caplog.records
    rdp.RdpAccountant().compose(small)
    assert any("failed to converge" in record.message for record in caplog.records)


def _last_digits(x: Tensor, y: Tensor) -> Tensor:
    """What the text of an object ends in: where it lies, if nobody takes that away."""
    return torch.tensor([[float(sum(map(ord, f"{object()}")) % 97)]]) + 0 * x.sum()


def test_texts_of_objects_in_a_statistic_of_all_records_have_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> set[float]:
        held, found = [], set()
        for size in range(1, 40):
            held.append([object() for _ in range(size)])
            found.add(float(isolated_rows(_last_digits, torch.ones(3, 2), torch.ones(3), 1)[0]))
        return found

    assert len(answers()) == 1
    monkeypatch.setattr(statistics, "without_addresses", nullcontext)
    assert len(answers()) > 1
