"""PATE from end to end on made-up clusters: students learn, statements hold, and what cannot work costs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confide
from confide import pate
from confide.cli.app import main
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.pate.graphs import Neighbours, coordinates, representatives
from confide.privacy.events import VotesEvent
from confide.privacy.ledger import Ledger
from confide.running.artefacts import load_run
from confide.sources.private_data import PrivateData

CLASSES, RECORDS, PUBLIC = 4, 1200, 240
CENTRES = torch.eye(CLASSES, 6) * 4


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=made)
    return CENTRES[y] + torch.randn(count, 6, generator=made), y


X, Y = blobs(RECORDS, 0)
INPUTS, ANSWERS = blobs(PUBLIC, 1)
X_TEST, Y_TEST = blobs(400, 2)


def data(**options: Any) -> PrivateData:
    return PrivateData(X, Y, schema=Schema(RECORDS, tuple(range(CLASSES))), **options)


def accuracy(run: pate.PateRun) -> float:
    predicted: Any = run.posterior.predict(X_TEST)
    return float((predicted.labels == Y_TEST).double().mean())


class TestFit:
    @pytest.mark.parametrize("student", [pate.Supervised(), pate.SemiSupervised(directions=6)])
    def test_students_learn_from_votes(self, student: Any) -> None:
        made = pate.plan(epsilon=4, delta=1e-5, teachers=40, queries=24)
        run = pate.fit(pate.LinearTeacher(), data(), INPUTS, made, student=student, seed=0)
        assert accuracy(run) > 0.9
        assert run.privacy.epsilon() <= 4
        assert run.privacy.epsilon() == pytest.approx(4, rel=1e-4)
        assert run.answered == 24

    def test_without_votes_nothing_is_learnt(self) -> None:
        """Catches a student that sees labels from somewhere else."""

        class Silent:
            def votes(self, x: Tensor, y: Tensor, inputs: Tensor, classes: int) -> Tensor:
                return torch.full((len(inputs),), -1)

        made = pate.plan(epsilon=4, delta=1e-5, teachers=40, queries=24)
        assert accuracy(pate.fit(Silent(), data(), INPUTS, made, seed=0)) < 0.6

    def test_networks_teach_too(self) -> None:
        made = pate.plan(epsilon=20, delta=1e-5, teachers=8, queries=16)
        teacher = pate.NetworkTeacher(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES)), epochs=8)
        before = [value.clone() for value in teacher.module.parameters()]
        run = pate.fit(teacher, data(), INPUTS, made, student=pate.SemiSupervised(directions=6), seed=0)
        assert accuracy(run) > 0.9
        for value, kept in zip(teacher.module.parameters(), before, strict=True):
            assert torch.equal(value, kept), "the module that was given saw no record"

    def test_a_threshold_leaves_queries_unanswered_and_paid_for(self) -> None:
        made = pate.plan(epsilon=8, delta=1e-5, teachers=40, queries=24, threshold=36, releases="histograms")
        ledger = Ledger()
        run = pate.fit(pate.LinearTeacher(), data(ledger=ledger), INPUTS, made, seed=0)
        counts = [event.count for event in ledger.events() if isinstance(event, VotesEvent)]
        assert counts == [24, 24]
        assert run.answered <= 24
        assert ledger.spent(1e-5) == pytest.approx(run.privacy.epsilon(), rel=1e-6)

    def test_the_statement_says_what_was_released_and_assumed(self) -> None:
        made = pate.plan(epsilon=2, delta=1e-5, teachers=40, queries=5)
        said = pate.fit(pate.LinearTeacher(), data(), INPUTS, made, seed=0).privacy.statement()
        assert "5 counts of votes with Gaussian noise" in said
        assert "however its record changes" in said
        assert "the inputs that the teachers were asked about are public" in said

    def test_a_seeded_run_claims_nothing(self) -> None:
        made = pate.plan(epsilon=2, delta=1e-5, teachers=40, queries=5)
        run = pate.fit(pate.LinearTeacher(), data(seed=1), INPUTS, made, seed=0)
        assert run.privacy.seeded
        assert "no privacy claim" in run.privacy.statement()

    def test_it_is_found_by_name(self) -> None:
        assert confide.pate is pate

    @pytest.mark.parametrize(
        ("inputs", "student", "complaint"),
        [
            (INPUTS[0], None, "public_inputs: must be a tensor with one row per input"),
            (INPUTS[:3], None, "there are 3 public inputs"),
            (torch.full((30, 6), torch.nan), None, "not finite"),
            (torch.ones(30, 6), None, "they are all alike"),
            (INPUTS, pate.Supervised(module=nn.Linear(5, CLASSES)), "shape|size"),
        ],
    )
    def test_what_cannot_work_costs_nothing(self, inputs: Any, student: Any, complaint: str) -> None:
        ledger = Ledger()
        made = pate.plan(epsilon=2, delta=1e-5, teachers=10, queries=12)
        with pytest.raises((Refusal, RuntimeError), match=complaint):
            pate.fit(pate.LinearTeacher(), data(ledger=ledger), inputs, made, student=student, seed=0)
        assert not ledger.entries()


class TestPlan:
    @pytest.mark.parametrize("threshold", [None, 150.0])
    @pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
    def test_the_target_is_met_and_used(self, threshold: float | None, adjacency: Any) -> None:
        made = pate.plan(epsilon=1, delta=1e-5, teachers=250, queries=100, threshold=threshold, adjacency=adjacency)
        assert 1 * (1 - 1e-5) < made.epsilon <= 1

    def test_queries_leave_room_for_the_votes(self) -> None:
        queries = pate.queries_for(1.0, 1e-5, 250, 4.0)
        noise = pate.plan(epsilon=1, delta=1e-5, teachers=250, queries=queries).mechanism.noise
        assert 250 / noise >= 4.0
        more = pate.plan(epsilon=1, delta=1e-5, teachers=250, queries=queries + 1).mechanism.noise
        assert 250 / more < 4.0

    @pytest.mark.parametrize("change", [{"epsilon": 0}, {"delta": 2}, {"queries": 0}, {"teachers": 0}])
    def test_bad_input_gets_one_sentence(self, change: dict[str, Any]) -> None:
        with pytest.raises(Refusal, match=f"{next(iter(change))}="):
            pate.plan(**{"epsilon": 1, "delta": 1e-5, "teachers": 10, "queries": 5, **change})


class TestGraphs:
    def test_labels_spread_within_clusters(self) -> None:
        places = coordinates(INPUTS, 6, torch.Generator().manual_seed(0))
        seeds = torch.zeros(PUBLIC, CLASSES)
        for one in range(CLASSES):
            seeds[ANSWERS.tolist().index(one), one] = 1
        scores = Neighbours.of(places, 10).spread_out(seeds)
        assert float(((scores / scores.sum(0)).argmax(1) == ANSWERS).double().mean()) > 0.9

    def test_representatives_are_as_many_as_asked_for_even_of_copies(self) -> None:
        places = torch.cat([torch.zeros(20, 2), torch.ones(20, 2)])
        with pytest.warns(Warning, match="distinct clusters"):
            chosen, _ = representatives(places, 5, 0)
        assert len(set(chosen.tolist())) == 5


class TestCommand:
    def table(self, path: Path, count: int, seed: int, *, labelled: bool = True) -> Path:
        x, y = blobs(count, seed)
        lines = [",".join([*(f"x{place}" for place in range(6)), *(["kind"] if labelled else [])])]
        for row, label in zip(x.tolist(), y.tolist(), strict=True):
            lines.append(",".join([*(f"{value:.3f}" for value in row), *([f"k{label}"] if labelled else [])]))
        path.write_text("\n".join(lines) + "\n")
        return path

    @pytest.mark.parametrize("student", [[], ["--kernel", "0.5"], ["--student", "supervised", "--kernel", "1"]])
    def test_from_files_to_a_posterior(
        self, student: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        train, test = self.table(tmp_path / "train.csv", RECORDS, 0), self.table(tmp_path / "test.csv", 200, 2)
        public = self.table(tmp_path / "public.csv", PUBLIC, 1, labelled=False)
        words = ["pate", str(train), "--target", "kind", "--assume-public", "--epsilon", "4", "--json"]
        words += ["--teachers", "40", "--queries", "24", "--test", str(test), "--out", str(tmp_path / "out"), *student]
        assert main([*words, "--public", str(train)]) == 2
        assert "is the training file" in capsys.readouterr().err
        assert main([*words, "--public", str(public), "--kernel", "0"]) == 2
        assert "--kernel=0: must be > 0" in capsys.readouterr().err
        assert main([*words, "--public", str(public)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["accuracy"] > 0.9
        assert found["privacy"]["epsilon"]["pld"] == pytest.approx(4, rel=1e-3)
        assert found["plan"]["queries"] == found["answered"] == 24
        loaded: Any = confide.load_posterior(tmp_path / "out" / "posterior.safetensors")
        assert loaded.predict(torch.zeros(2, 6)).probabilities.shape == (2, CLASSES)
        predicted = tmp_path / "predicted.csv"
        assert main(["predict", str(tmp_path / "out"), str(test), "--out", str(predicted)]) == 0
        rows = predicted.read_text().splitlines()
        assert len(rows) == 201
        truth = [line.split(",")[-1] for line in test.read_text().splitlines()[1:]]
        place = rows[0].split(",").index("predicted")
        right = sum(row.split(",")[place] == label for row, label in zip(rows[1:], truth, strict=True))
        assert right / 200 == pytest.approx(found["accuracy"])
        read = load_run(tmp_path / "out")
        assert read.privacy.epsilon() == found["privacy"]["epsilon"]["pld"]


def test_a_kernel_learns_what_is_not_linear_and_a_wrong_label_harms_it_less() -> None:
    made = torch.Generator().manual_seed(5)
    inputs = torch.randn(500, 2, generator=made)
    labels = (inputs.prod(1) > 0).long()  # opposite quarters: no line tells them apart
    asked, wrong = torch.arange(400), torch.rand(400, generator=made) < 0.15
    told = pate.VotesAnswers(torch.where(wrong, 1 - labels[:400], labels[:400]))

    def predicted(**settings: Any) -> Any:
        return pate.Supervised(epochs=30, **settings).learn(inputs, asked, told, 2, 0).predict(inputs[400:])

    by_kernel = predicted(dimensions=2, kernel=0.5)
    right = (by_kernel.labels == labels[400:]).double().mean()
    assert right > 0.9 > 0.7 > (predicted().labels == labels[400:]).double().mean()
    sure = by_kernel.probabilities.max(1).values.mean()
    assert 0.7 < sure < 0.97  # 15 of 100 labels were wrong, and the held-out tenth has seen it


def test_a_kernel_has_as_many_landmarks_as_memory_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs of a hundred thousand public inputs would take 40 GB, after the votes were paid for."""
    monkeypatch.setattr("confide.pate.kernels.MOST_LANDMARKS", 60)
    student = pate.SemiSupervised(kernel=0.5, directions=6)
    learnt: Any = student.learn(INPUTS, torch.arange(PUBLIC), pate.VotesAnswers(ANSWERS), CLASSES, 0)
    assert len(learnt.module[0].places) == 60
    assert float((learnt.predict(INPUTS).labels == ANSWERS).double().mean()) > 0.9


def test_a_kernel_that_is_no_longer_whole_is_refused(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    student, path = pate.Supervised(kernel=0.5), tmp_path / "posterior.safetensors"
    student.learn(INPUTS, torch.arange(PUBLIC), pate.VotesAnswers(ANSWERS), CLASSES, 0).save(path)
    with safe_open(path, "pt") as file:
        about = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    for change in ({"kernel.places": torch.ones(9, 5)}, {"kernel.reach": torch.ones(2)}):
        save_file(tensors | change, str(path), metadata=about)
        with pytest.raises(Refusal, match="the file is damaged"):
            confide.load_posterior(path)


def test_a_kernel_without_width_is_refused() -> None:
    with pytest.raises(Refusal, match="kernel=0"):
        pate.SemiSupervised(kernel=0.0)
