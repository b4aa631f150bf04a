"""Every method from fit to predict, save, load and checkpoint on the device; nothing here is listed by method."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confide
from confide import methods
from confide.data import Input
from confide.devices import device_of
from confide.running.journal import Checkpoints
from tests.conformance.conftest import Case, case_for, small_plan

pytestmark = pytest.mark.gpu
LONG = ("em", "tabular")  # seconds each, on the host too
every_method = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in methods.names()]
)
CLOSE = 2e-3  # of a probability or a mean after a few steps: devices round in other ways
HOST = torch.device("cpu")


def said(posterior: Any, case: Case) -> Tensor:
    """What a posterior predicts, on the host; the parameters of one that says nothing."""
    found: Tensor = posterior.summary(case.x).centre
    assert found.device == HOST
    return found


def on(device: torch.device, module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).to(device)


def fitted(name: str, case: Case, module: nn.Module, steps: int = 5, **options: Any) -> confide.Run:
    return confide.fit(methods.get(name)(), module, case.data(), small_plan(case, steps=steps), seed=5, **options)


@every_method
def test_a_run_is_that_of_the_host_and_survives_files(name: str, device: torch.device, tmp_path: Path) -> None:
    case = case_for(methods.get(name))
    here, there = fitted(name, case, case.module), fitted(name, case, on(device, case.module))
    assert device_of(here.posterior.module) == HOST
    assert device_of(there.posterior.module) == device
    first = said(there.posterior, case)
    torch.testing.assert_close(first, said(here.posterior, case), atol=CLOSE, rtol=CLOSE)

    path = tmp_path / "posterior.safetensors"
    there.posterior.save(path)
    again = confide.load_posterior(path)  # a network of confide's own, made anew where the file says
    assert device_of(again.module) == device
    torch.testing.assert_close(said(again, case), first, atol=CLOSE, rtol=CLOSE)
    if type(there.posterior.module) is type(case.module):
        for module in (case.module, on(device, case.module)):  # a network of one's own: where it is
            again = confide.load_posterior(path, module=module)
            assert device_of(again.module) == device_of(module)
            torch.testing.assert_close(said(again, case), first, atol=CLOSE, rtol=CLOSE)


ON_EITHER_SIDE = ("bbp", "sghmc")  # of the others only the long run asks


@pytest.mark.parametrize(
    "name",
    [name if name in ON_EITHER_SIDE else pytest.param(name, marks=pytest.mark.slow) for name in methods.names()],
)
def test_a_run_that_stopped_goes_on_on_either_side(name: str, device: torch.device, tmp_path: Path) -> None:
    case = case_for(methods.get(name))
    whole = fitted(name, case, on(device, case.module), steps=6)
    for first, second in ((device, HOST), (HOST, device)):
        place = Checkpoints(tmp_path / f"{first.type}-{second.type}", every=2)
        data = case.data(ledger=tmp_path / f"{first.type}-{second.type}.ledger", name="d")
        plan = small_plan(case, steps=6)

        def stop(done: int, total: int) -> None:
            if done == 4:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            confide.fit(
                methods.get(name)(), on(first, case.module), data, plan, seed=5, checkpoint=place, progress=stop
            )
        run = confide.fit(methods.get(name)(), on(second, case.module), data, plan, seed=5, checkpoint=place)
        assert device_of(run.posterior.module) == second
        torch.testing.assert_close(said(run.posterior, case), said(whole.posterior, case), atol=CLOSE, rtol=CLOSE)


def test_an_estimator_is_told_where_to_compute(device: torch.device) -> None:
    case = case_for(methods.SGLD)
    options: dict[str, Any] = {"method": "sgld", "epsilon": 8.0, "delta": 1e-3, "steps": 3, "assume_public": True}
    x, y = case.x.numpy(), case.y.numpy()
    there = confide.PrivateBayesClassifier(**options, device=device).fit(x, y)
    assert device_of(there.posterior_.module) == device
    assert len(there.predict_proba(x)) == len(x)


@pytest.mark.slow  # a report
def test_a_command_is_told_where_to_compute(device: torch.device, tmp_path: Path) -> None:
    """It puts its own network there; a device that nobody has is refused before anything is charged."""
    from tests.cli.conftest import FACTS, call, patients

    (tmp_path / "train.csv").write_text(patients(120, 0))
    (tmp_path / "facts.toml").write_text(FACTS)
    words: tuple[Any, ...] = (
        "fit",
        tmp_path / "train.csv",
        "--facts",
        tmp_path / "facts.toml",
        "--method",
        "sgld",
        "--json",
    )
    words = (*words, "--epsilon", 8, "--steps", 3, "--delta", 1e-3, "--ledger", tmp_path / "ledger")
    refused = call(*words, "--out", tmp_path / "none", "--device", "cuda:77")
    assert refused.code == 2
    assert "cuda:77" in refused.err
    assert not (tmp_path / "ledger").exists()
    assert call(*words, "--out", tmp_path / "run", "--device", str(device)).code == 0
    file = tmp_path / "run" / "posterior.safetensors"
    assert device_of(confide.load_posterior(file).module) == device


@every_method
def test_a_device_without_double_precision_has_the_host_compute(
    name: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on MPS: the emulated device refuses doubles, so that none is made there; predictions are made on it."""
    from confide import devices
    from confide.errors import SpeedWarning
    from tests.devices.pretend import MEMORY, NAME

    monkeypatch.setattr(devices, "_WITHOUT_DOUBLES", (device.type,))
    monkeypatch.setattr(MEMORY, "doubles", device.type != NAME)
    case = case_for(methods.get(name))
    module = on(device, case.module.float())
    with nullcontext() if methods.get(name).on_host else pytest.warns(SpeedWarning, match="no double precision"):
        there = fitted(name, case, module)
    assert device_of(there.posterior.module) == device
    here = fitted(name, case, case.module.float())
    torch.testing.assert_close(said(there.posterior, case), said(here.posterior, case), atol=CLOSE, rtol=CLOSE)
    there.posterior.save(tmp_path / "posterior.safetensors")
    again = confide.load_posterior(tmp_path / "posterior.safetensors")
    assert device_of(again.module) == device
    torch.testing.assert_close(said(again, case), said(there.posterior, case), atol=CLOSE, rtol=CLOSE)


@pytest.mark.slow  # plots
def test_a_whole_run_is_written_and_read(device: torch.device, tmp_path: Path) -> None:
    case = case_for(methods.SGLD)
    run = fitted("sgld", case, on(device, case.module))
    run.save(tmp_path / "run", test=(case.x, case.y), public=True)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["method"]["name"] == "sgld"
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_a_file_of_a_device_that_is_not_there_comes_to_the_host(device: torch.device, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    case = case_for(methods.SGLD)
    run = fitted("sgld", case, on(device, case.module))
    run.posterior.save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as archive:
        about = json.loads(archive.metadata()["confide"])
    assert about["device"] == str(device)
    about["device"] = "cuda:77"
    save_file(load_file(tmp_path / "a.safetensors"), tmp_path / "b.safetensors", {"confide": json.dumps(about)})
    assert device_of(confide.load_posterior(tmp_path / "b.safetensors").module) == HOST


def test_secure_noise_and_watchers(device: torch.device) -> None:
    """The lattice is the host's: the sum goes there for its noise, and comes back."""
    case = case_for(methods.SGLD)
    norms: list[Tensor] = []
    data = case.data(watch=lambda mechanism, found: norms.append(found))
    run = confide.fit(methods.SGLD(), on(device, case.module), data, small_plan(case, steps=3), seed=5, secure=True)
    assert len(norms) == 3
    assert torch.isfinite(said(run.posterior, case)).all()


def test_records_and_questions_on_the_device_are_taken(device: torch.device) -> None:
    case = case_for(methods.SGLD)
    data = confide.PrivateData(case.x.to(device), case.y.to(device), schema=case.schema, seed=7)
    plan = small_plan(case, steps=5)
    run = confide.fit(methods.SGLD(), on(device, case.module), data, plan, seed=5)
    given = run.posterior.summary(case.x.to(device)).centre
    torch.testing.assert_close(given, said(run.posterior, case))
    torch.testing.assert_close(given, said(fitted("sgld", case, case.module).posterior, case), atol=CLOSE, rtol=CLOSE)


def test_callbacks_see_the_run(device: torch.device) -> None:
    case = case_for(methods.SGLD)
    seen: list[Any] = []
    run = fitted(
        "sgld",
        case,
        on(device, case.module),
        callbacks=[lambda moment: seen.append(moment)],
        validation=(case.x, case.y),
    )
    assert seen
    assert device_of(run.posterior.module) == device


class CountingOnDefault(nn.Module):
    """Makes numbers where torch is told to make them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.last = nn.Embedding(20, 4), nn.Embedding(6, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.last((self.words(ids) + self.places(torch.arange(6))).mean(1))
        return found


def test_a_network_may_count_on_the_default_device(device: torch.device) -> None:
    ids = torch.randint(0, 20, (40, 6), generator=torch.Generator().manual_seed(0))
    schema = confide.Schema(classes=2, records=40, inputs=Input(vocabulary=20))
    plan = confide.plan(records=40, batch=10, steps=3, noise_multiplier=1.0, delta=1e-5)
    torch.manual_seed(0)
    module: nn.Module = CountingOnDefault()
    label = (ids[:, 0] > 9).long()
    here = confide.fit(methods.SGLD(), module, confide.PrivateData(ids, label, schema=schema, seed=7), plan, seed=5)
    module = on(device, module)
    torch.set_default_device(device)
    try:
        there = confide.fit(
            methods.SGLD(), module, confide.PrivateData(ids, label, schema=schema, seed=7), plan, seed=5
        )
        found = there.posterior.summary(ids).centre
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(found, here.posterior.summary(ids).centre, atol=CLOSE, rtol=CLOSE)
