"""What a run leaves on disk: strict JSON, checked when it is read back, and a posterior that no failure loses."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import confide
from confide.data.preprocessing import Encoder
from confide.data.schema import Column
from confide.errors import Unfinished
from confide.posteriors.files import load_posterior
from confide.privacy.bayesian.result import Trusted
from confide.privacy.events import GaussianEvent, event_from_dict
from confide.privacy.ledger import Ledger
from confide.privacy.statement import Privacy
from confide.running.artefacts import POSTERIOR, RECORD, REPORT, UNVERIFIED, load_run, save_run, sha256
from confide.running.fit import Run
from confide.wording import plain
from tests.conformance.conftest import classification, small_plan
from tests.report.runs import class_evaluation, make_run


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def stamped(privacy: Privacy) -> Privacy:
    """As it comes back from a folder, which anybody could have written."""
    return replace(privacy, assumptions=(*privacy.assumptions, UNVERIFIED))


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the disk is full")


def read(directory: Path) -> dict[str, Any]:
    record = json.loads((directory / RECORD).read_text(encoding="utf-8"), parse_constant=refuse)
    assert isinstance(record, dict)
    return record


@pytest.fixture(scope="module")
def saved(class_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("out") / "deep" / "run"
    config = {"train": "x.csv", "hidden": (4,), "noise": math.inf, "odd": math.nan}
    return save_run(class_run, directory, evaluation=class_evaluation(), config=config)


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(saved, tmp_path / "copy"))


class TestLedger:
    """What is kept of the ledger with a run, so that one that was rolled back is noticed."""

    def fitted(self, ledger: confide.Ledger | None) -> Run:
        case = classification()
        data = case.data(ledger=ledger, name="people", seed=None)
        return confide.fit(confide.methods.SGD(), case.module, data, small_plan(case), seed=5)

    def test_the_head_is_kept_in_record_and_report(self, tmp_path: Path) -> None:
        with confide.Ledger(tmp_path / "budget.db") as ledger:
            ledger.limit(50.0, 1e-5)
            run = self.fitted(ledger)
            noted = ledger.head
            save_run(run, tmp_path / "run")
            self.fitted(ledger)
            ledger.verify(noted)
        head = read(tmp_path / "run")["ledger"]["head"]
        assert (head["dataset"], head["count"], head["hash"]) == ("people", noted.count, noted.hash)
        assert str(noted) in (tmp_path / "run" / REPORT).read_text()
        assert "one plan, fixed in advance" in load_run(tmp_path / "run").privacy.statement()

    def test_a_ledger_in_memory_is_said_to_be_none(self, tmp_path: Path) -> None:
        run = self.fitted(None)
        assert run.ledger is None
        assert run.privacy.ledger == ""
        save_run(run, tmp_path / "run")
        assert read(tmp_path / "run")["ledger"]["head"] is None
        assert "none was kept, so nothing adds this run up" in (tmp_path / "run" / REPORT).read_text()

    def test_the_second_plan_is_stated_to_be_filtered(self) -> None:
        ledger = confide.Ledger()
        ledger.limit(50.0, 1e-5)
        self.fitted(ledger)
        said = self.fitted(ledger).privacy.statement()
        assert "(2 plans) stays within epsilon = 50" in said
        assert "filter, which is proven also where a plan was chosen" in said

    def test_without_a_ceiling_several_plans_are_not_proven_together(self) -> None:
        ledger = confide.Ledger()
        self.fitted(ledger)
        assert "proven only if all of them were fixed" in self.fitted(ledger).privacy.statement()
        ledger.limit(50.0, 1e-5)
        assert "set or changed after 2 of the plans" in self.fitted(ledger).privacy.statement()


class TestSave:
    def test_three_files_and_no_trace_of_the_draft(self, saved: Path) -> None:
        assert sorted(os.listdir(saved)) == sorted([POSTERIOR, RECORD, REPORT])
        assert os.listdir(saved.parent) == ["run"]

    def test_record_is_complete(self, saved: Path, class_run: Run) -> None:
        record = read(saved)
        assert record["method"]["name"] == "sgld"
        assert record["method"]["parameters"]["prior"] == {"type": "GaussianPrior", "scale": 1.0}
        assert record["plan"]["steps"] == 4
        assert record["plan"]["blocks"][0]["noise_multiplier"] == 8.0
        assert tuple(event_from_dict(event) for event in record["events"]) == class_run.privacy.events
        assert record["epsilon"]["pld"] == class_run.privacy.epsilon()
        assert set(record["kind"]) == set(record["epsilon"]) >= {"pld", "rdp", "gdp_clt", "zcdp"}
        assert record["attacker"]["accuracy"] == class_run.privacy.attacker().accuracy
        assert record["metrics"] == class_evaluation().metrics()
        assert record["test"] == {"inputs": 80, "source": "separate hold-out declared by the user"}
        assert confide.Schema.from_dict(record["schema"]) == class_run.schema
        assert record["versions"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
        assert record["seeded"] is False
        assert record["created"].endswith("+00:00")
        assert record["sha256"] == {name: sha256(saved / name) for name in (POSTERIOR, REPORT)}

    def test_report_carries_the_hash_of_the_posterior(self, saved: Path) -> None:
        assert read(saved)["sha256"][POSTERIOR] in (saved / REPORT).read_text(encoding="utf-8")

    def test_what_json_cannot_say(self, saved: Path, open_run: Run, tmp_path: Path) -> None:
        """Infinity and NaN as bare words are not JSON: other readers stop at them."""
        assert read(saved)["config"] == {"train": "x.csv", "hidden": [4], "noise": "Infinity", "odd": None}
        record = read(save_run(open_run, tmp_path / "open", metrics={"nll": math.nan, "rmse": math.inf}))
        assert record["epsilon"]["pld"] == "Infinity"
        assert record["metrics"] == {"nll": None, "rmse": "Infinity"}
        assert record["attacker"] is None
        assert "not private" in (tmp_path / "open" / REPORT).read_text(encoding="utf-8")

    def test_strict_knows_the_common_types(self) -> None:
        import numpy as np

        values = {1: np.float64("nan"), "a": torch.tensor([1.0, math.inf]), "b": np.int64(3), "c": {2}, "d": Path("x")}
        assert plain(values, infinity_as_text=True) == {"1": None, "a": [1.0, "Infinity"], "b": 3, "c": [2], "d": "x"}
        json.dumps(plain(values), allow_nan=False)

    def test_events_without_a_sound_bound_are_saved_without_a_claim(self, class_run: Run, tmp_path: Path) -> None:
        """The budget is spent by then: refusing to save would lose the result."""
        privacy = Privacy((GaussianEvent(2.0, "shuffle", 0.5, 3, 40),), 1e-5)
        record = read(save_run(replace(class_run, privacy=privacy), tmp_path / "run"))
        assert record["epsilon"] == {"pld": None}
        assert record["kind"]["pld"].startswith("not applicable")
        assert record["statement"].startswith("No privacy is claimed")

    def test_the_run_saves_itself(self, seeded_run: Run, tmp_path: Path) -> None:
        seeded_run.save(str(tmp_path / "run"))
        assert read(tmp_path / "run")["seeded"] is True


class TestRefusals:
    @pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
    def test_a_target_that_exists_stays_as_it_was(self, class_run: Run, tmp_path: Path, kind: str) -> None:
        target = tmp_path / "run"
        if kind == "directory":
            target.mkdir()
        elif kind == "file":
            target.write_text("mine")
        else:
            target.symlink_to(tmp_path / "nowhere")
        with pytest.raises(ValueError, match="exists already; name a new one"):
            save_run(class_run, target)
        assert os.listdir(tmp_path) == ["run"]
        assert kind != "directory" or os.listdir(target) == []
        assert kind != "file" or target.read_text() == "mine"

    @pytest.mark.parametrize("name", ["", ".", ".."])
    def test_a_target_without_a_name(self, class_run: Run, name: str) -> None:
        with pytest.raises(ValueError, match="must name a new directory"):
            save_run(class_run, name)

    def test_a_parent_that_is_a_file(self, class_run: Run, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        with pytest.raises(ValueError, match="cannot be written"):
            save_run(class_run, tmp_path / "file" / "run")
        assert os.listdir(tmp_path) == ["file"]

    def test_without_a_posterior_nothing_stays(self, class_run: Run, tmp_path: Path) -> None:
        """Neither a draft nor a parent directory made for it, and no half of a posterior."""

        class Broken:
            facts: ClassVar[dict[str, Any]] = {}

            def save(self, path: Path) -> None:
                path.write_bytes(b"half of it")
                raise RuntimeError("the disk is full")

        with pytest.raises(RuntimeError, match="disk is full"):
            save_run(replace(class_run, posterior=Broken()), tmp_path / "new" / "run")  # type: ignore[arg-type]
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("step", ["sha256", "run_record", "sync"])
    def test_a_posterior_that_was_written_stays(
        self, class_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """It was paid for: whatever fails after it, it is kept, and the message says where."""
        monkeypatch.setattr(sys.modules["confide.running.artefacts"], step, fail)
        with pytest.raises(Unfinished, match="disk is full") as caught:
            save_run(class_run, tmp_path / "new" / "run")
        (kept,) = (tmp_path / "new").iterdir()
        assert caught.value.kept == kept
        assert str(kept) in str(caught.value)
        assert not (tmp_path / "new" / "run").exists()
        for place in (kept / POSTERIOR, kept):  # the file, or the folder of the run
            assert torch.equal(load_posterior(place).mean(), class_run.posterior.mean())  # type: ignore[attr-defined]

    def test_without_its_report_a_run_is_whole(
        self, class_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules["confide.running.artefacts"], "render", fail)
        with pytest.raises(Unfinished, match=r"report\.html could not be written") as caught:
            save_run(class_run, tmp_path / "run")
        assert caught.value.kept == tmp_path / "run"
        assert sorted(os.listdir(tmp_path)) == ["run"]
        assert sorted(os.listdir(tmp_path / "run")) == ["posterior.safetensors", "run.json"]
        found = load_run(tmp_path / "run")
        assert found.privacy == stamped(class_run.privacy)
        assert list(found.record["sha256"]) == [POSTERIOR]

    def test_what_was_computed_from_records_is_not_written(self, class_run: Run, tmp_path: Path) -> None:
        """A settings object is written field by field, and this one's fields are draws without any protection."""

        @dataclass(frozen=True, eq=False, repr=False)
        class Hidden(Trusted):
            draws: tuple[float, ...] = (0.123456789,)

        save_run(class_run, tmp_path / "run", config={"estimate": Hidden(), "inside": [{"deep": Hidden()}]})
        for name in ("run.json", "report.html"):
            text = (tmp_path / "run" / name).read_text()
            assert "0.123456789" not in text
            assert "computed from private records without protection" in text

    def test_left_over_drafts_are_cleaned_unless_they_hold_a_posterior(self, class_run: Run, tmp_path: Path) -> None:
        paid, empty = (tmp_path / f".run.{mark * 6}.partial" for mark in ("0a", "0b"))
        for draft in (paid, empty):
            draft.mkdir()
        class_run.posterior.save(paid / POSTERIOR)
        for path in (paid / POSTERIOR, paid, empty):
            os.utime(path, (0, 0))
        save_run(class_run, tmp_path / "run")
        assert sorted(os.listdir(tmp_path)) == sorted([paid.name, "run"])

    def test_someone_else_takes_the_name_meanwhile(
        self, class_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = tmp_path / "run"

        def sync(_: Path) -> None:
            target.mkdir(exist_ok=True)
            (target / "theirs").write_text("theirs")

        monkeypatch.setattr(sys.modules["confide.running.artefacts"], "sync", sync)
        with pytest.raises(Unfinished, match="exists already") as caught:
            save_run(class_run, target)
        assert sorted(os.listdir(tmp_path)) == sorted(["run", caught.value.kept.name])
        assert os.listdir(target) == ["theirs"]


class TestLoad:
    def test_everything_comes_back(self, saved: Path, class_run: Run) -> None:
        found = load_run(saved)
        x = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
        ours, theirs = class_run.posterior.predict(x), found.posterior.predict(x)
        assert torch.equal(ours.draws, theirs.draws)  # type: ignore[union-attr]
        assert found.privacy == stamped(class_run.privacy)
        assert found.schema == class_run.schema
        assert found.metrics == class_evaluation().metrics()
        assert found.encoder is None
        assert found.record["config"]["train"] == "x.csv"

    def test_encoder_and_odd_metrics_come_back(self, class_run: Run, tmp_path: Path) -> None:
        encoder = Encoder(confide.Schema(records=40, classes=2, columns=[Column("age", bounds=(0, 9))]))
        save_run(class_run, tmp_path / "run", encoder=encoder, metrics={"nll": math.nan, "rmse": math.inf})
        found = load_run(tmp_path / "run")
        assert found.encoder is not None
        assert Encoder.from_dict(found.encoder) == encoder
        assert math.isnan(found.metrics["nll"])
        assert found.metrics["rmse"] == math.inf

    @pytest.mark.parametrize("place", [0, 9, -1])
    def test_a_flipped_byte_is_found(self, copied: Path, place: int) -> None:
        content = bytearray((copied / POSTERIOR).read_bytes())
        content[place] ^= 1
        (copied / POSTERIOR).write_bytes(bytes(content))
        with pytest.raises(ValueError, match="SHA-256 differs"):
            load_run(copied)

    def test_without_the_flip_it_loads(self, copied: Path) -> None:
        assert load_run(copied).directory == copied

    def test_a_missing_directory_or_file(self, copied: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="not a directory"):
            load_run(tmp_path / "nowhere")
        (copied / POSTERIOR).unlink()
        with pytest.raises(ValueError, match=f"has no {POSTERIOR}"):
            load_run(copied)
        (copied / RECORD).unlink()
        with pytest.raises(ValueError, match=f"has no {RECORD}"):
            load_run(copied)

    @pytest.mark.parametrize("name", [POSTERIOR, RECORD])
    def test_links_that_leave_the_directory(self, copied: Path, tmp_path: Path, name: str) -> None:
        """A planted link must not make a reader open a file elsewhere."""
        (copied / name).rename(tmp_path / "elsewhere")
        (copied / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="leads outside"):
            load_run(copied)

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("{", "not a readable record"),
            ("[]", "format None is not known"),
            ('{"format": 99}', "format 99 is not known"),
            ('{"format": 1}', "damaged; events, delta"),
            ('{"format": 1, "delta": NaN}', "NaN is not JSON"),
        ],
    )
    def test_a_damaged_record(self, copied: Path, text: str, match: str) -> None:
        (copied / RECORD).write_text(text)
        with pytest.raises(ValueError, match=match):
            load_run(copied)

    @pytest.mark.parametrize(
        ("key", "value"),
        [("events", 5), ("events", [{"kind": "magic"}]), ("metrics", {"nll": "x"}), ("schema", []), ("delta", "x")],
    )
    def test_a_record_with_a_wrong_value(self, copied: Path, key: str, value: Any) -> None:
        record = json.loads((copied / RECORD).read_text(encoding="utf-8"))
        (copied / RECORD).write_text(json.dumps(record | {key: value}))
        with pytest.raises(ValueError, match="damaged; a value is not"):
            load_run(copied)

    def test_forged_events_are_not_verified(self, tmp_path: Path) -> None:
        """The statement says so; with the ledger that was charged they are held against it."""
        schema, ledger = confide.Schema(records=40, classes=2), Ledger()
        x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
        data = confide.PrivateData(x, y, schema=schema, ledger=ledger, name="d")
        plan = confide.plan(noise_multiplier=1.0, delta=1e-3, records=40, batch=10, steps=4)
        save_run(confide.fit(confide.methods.SGD(), confide.networks.softmax(3, 2), data, plan), tmp_path / "run")
        assert "not verified against a ledger" in load_run(tmp_path / "run").privacy.statement()
        assert load_run(tmp_path / "run", ledger=ledger).privacy.assumptions == ()
        record = read(tmp_path / "run")
        for event in record["events"]:
            event["noise_multiplier"] = 50.0
        (tmp_path / "run" / RECORD).write_text(json.dumps(record))
        assert "not verified against a ledger" in load_run(tmp_path / "run").privacy.statement()
        with pytest.raises(ValueError, match="its events are not in this ledger"):
            load_run(tmp_path / "run", ledger=ledger)

    def test_a_record_of_lists_without_end(self, copied: Path) -> None:
        (copied / RECORD).write_text("[" * 50_000)
        with pytest.raises(ValueError, match="not a readable record"):
            load_run(copied)

    def test_a_network_of_ones_own_must_be_given(self, tmp_path: Path) -> None:
        module = nn.Linear(3, 2)
        run = make_run(confide.Schema(records=40, classes=2), module=module)
        save_run(run, tmp_path / "run")
        with pytest.raises(ValueError, match="pass it as module="):
            load_run(tmp_path / "run")
        found = load_run(tmp_path / "run", module)
        assert torch.equal(found.posterior.draws, run.posterior.draws)  # type: ignore[attr-defined]
