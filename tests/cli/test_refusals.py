"""Bad input of every kind: exit 2, one clear sentence, nothing written, nothing spent."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from confide.privacy.ledger import Ledger
from tests.cli.conftest import FACTS, Result, call, is_refusal, patients

Run = Callable[..., Result]
GOOD = patients(120, 0)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below the folder with its bytes; SQLite's own side files come and go."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"<directory>"
        for path in sorted(folder.rglob("*"))
        if not path.name.endswith(("-wal", "-shm"))
    }


def words(files: Path, *changed: object) -> tuple[object, ...]:
    """A command line that is right, followed by options that overrule it."""
    right = ("fit", files / "train.csv", "--facts", files / "facts.toml", "--epsilon", 2, "--delta", 1e-3)
    rest = ("--steps", 2, "--batch", 30, "--ledger", files / "budget.db", "--out", files / "run", "--json")
    return (*right, *rest, *changed)


def first_line_changed(text: str, line: str) -> str:
    head, _, rest = text.partition("\n")
    return "\n".join([head, line, rest])


BAD_FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "empty"),
    "header only": ("age,dose,ward,ill\n", "no records"),
    "missing target": (GOOD.replace("ill", "sick", 1), "ill"),
    "missing column": (GOOD.replace("dose", "doses", 1), "dose"),
    "ragged": (first_line_changed(GOOD, "1,2"), "2 cells"),
    "repeated column": (GOOD.replace("dose", "age", 1), "columns 1, 2 have the same name"),
    "colons": (GOOD.replace(",", ":"), "no such column"),
    "binary garbage": (bytes(range(256)) * 40, "source="),
    "a zip": (b"PK\x03\x04" + bytes(200), "source="),
    "utf-16": (GOOD.encode("utf-16"), "UTF-16"),
    "null bytes": (b"\x00" * 4096, "source="),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_training_files(run: Run, files: Path, name: str) -> None:
    content, hint = BAD_FILES[name]
    (files / "train.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    before = snapshot(files)
    result = run(*words(files))
    assert is_refusal(result), result
    assert hint in result.err
    assert snapshot(files) == before


ODD_RECORDS: dict[str, tuple[str, str]] = {
    "text in a numeric column": (first_line_changed(GOOD, "old,0.5,north,yes"), "1 of 121"),
    "not a number": (first_line_changed(GOOD, "nan,0.5,north,yes"), "1 of 121"),
    "infinity": (first_line_changed(GOOD, "-inf,0.5,north,yes"), "1 of 121"),
    "a hole": (first_line_changed(GOOD, ",0.5,north,yes"), "1 of 121"),
    "one class": (GOOD.replace("yes", "no"), "same class"),
    "no known class": (GOOD.replace("yes", "oui").replace("no\n", "non\n"), "no record has a declared class"),
    "one record": ("age,dose,ward,ill\n1,0.5,north,yes\n", "records=120"),
}


@pytest.mark.parametrize("name", ODD_RECORDS)
def test_no_record_decides_whether_there_is_a_run(run: Run, files: Path, name: str) -> None:
    """The curator is told on the terminal; nothing of it is written down."""
    content, note = ODD_RECORDS[name]
    (files / "train.csv").write_text(content)
    result = run(*words(files))
    assert result.code == 0, result.err
    assert "for the curator alone" in result.err
    assert note in " ".join(result.err.split())
    written = "".join(path.read_text() for path in (files / "run").iterdir() if path.suffix in (".json", ".html"))
    assert note not in written
    assert "curator alone" not in written


def test_a_message_never_quotes_a_cell(run: Run, files: Path) -> None:
    """A log file is not behind the boundary: what stands in a record must not get there."""
    (files / "train.csv").write_text(first_line_changed(GOOD, "secret-cell,0.5,north,yes"))
    assert "secret-cell" not in run(*words(files)).err


BAD_FACTS = {
    "not toml": ("records = = 3", "TOML"),
    "unknown key": (FACTS.replace("records", "rekords"), "rekords"),
    "bounds the wrong way round": (FACTS.replace("[0, 100]", "[100, 0]"), "age"),
    "infinite bounds": (FACTS.replace("[0, 100]", "[0, inf]"), "age"),
    "one class": (FACTS.replace('["no", "yes"]', '["no"]'), "classes"),
    "no size": (FACTS.replace("records = 120", ""), "records"),
    "negative size": (FACTS.replace("120", "-5"), "records"),
    "a column that is not there": (FACTS + "[columns.height]\nbounds = [0, 1]\n", "height"),
    "a column left open": (FACTS.replace("[columns.dose]\nbounds = [0, 1]\n", ""), "column 2"),
    "the target as a feature": (FACTS + "[columns.ill]\nbounds = [0, 1]\n", "ill"),
}


@pytest.mark.parametrize("name", BAD_FACTS)
def test_bad_facts(run: Run, files: Path, name: str) -> None:
    content, hint = BAD_FACTS[name]
    (files / "facts.toml").write_text(content)
    before = snapshot(files)
    result = run(*words(files))
    assert is_refusal(result), result
    assert hint in result.err
    assert snapshot(files) == before


BAD_OPTIONS: list[tuple[list[object], str]] = [
    (["--epsilon", 0], "--epsilon"),
    (["--epsilon", -1], "--epsilon"),
    (["--epsilon", "nan"], "--epsilon"),
    (["--epsilon", "inf"], "--epsilon"),
    (["--epsilon", "much"], "--epsilon=much: must be a number"),
    (["--delta", 1], "--delta"),
    (["--delta", 2], "--delta"),
    (["--delta", 0], "--delta"),
    (["--delta", 0.01], "1 / records"),
    (["--method", "nonsense"], "--method"),
    (["--method", ""], "--method"),
    (["--epochs", 3], "--epochs"),
    (["--steps", 0], "--steps"),
    (["--steps", "3.5"], "--steps=3.5: must be a whole number"),
    (["--noise-scale", 1], "classification has no such scale"),
    (["--method", "sgdl"], "did you mean sgd?"),
    (["--batch", 0], "--batch"),
    (["--batch", 121], "--batch"),
    (["--clip", 0], "--clip"),
    (["--clip", "nan"], "--clip"),
    (["--noise-scale", 0], "--noise-scale"),
    (["--prior-scale", -1], "--prior-scale"),
    (["--hidden", "a,b"], "--hidden"),
    (["--hidden", "0"], "--hidden"),
    (["--hidden", "99999,2000"], "--hidden"),
    (["--set", "decay"], "--set"),
    (["--set", "nonsense=1"], "nonsense"),
    (["--set", "decay=fast"], "--set"),
    (["--set", "decay=5"], "decay"),
    (["--set", "decay=0.1", "--set", "decay=0.2"], "--set"),
    (["--sampling", "random"], "--sampling"),
    (["--sampling", "shuffle"], "--adjacency"),
    (["--sampling", "full-batch"], "--batch"),
    (["--adjacency", "none"], "--adjacency"),
    (["--task", "clustering"], "--task"),
    (["--split", 1], "--split"),
    (["--seed", -1], "--seed"),
    (["--seed", 2**70], "--seed"),
    (["--target", "nonsense"], "nonsense"),
    (["--test", "absent.csv"], "absent.csv"),
    (["--facts", "absent.toml"], "absent.toml': no such file"),
    (["--ledger", "absent/folder/budget.db"], "--ledger"),
    (["--out", "."], "--out"),
    (["--out", ""], "--out"),
    (["--out", "/dev/null/run"], "--out"),
    (["--unknown", 1], "--unknown"),
    (["another"], "several files at once must be .parquet"),
    (["--epsilon"], "--epsilon"),
]


@pytest.mark.parametrize(("changed", "hint"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_bad_options(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch, changed: list[object], hint: str) -> None:
    monkeypatch.chdir(files)
    before = snapshot(files)
    result = run(*words(files, *changed))
    assert is_refusal(result), result
    assert hint in result.err
    assert snapshot(files) == before


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_a_place_that_is_taken_is_refused(run: Run, files: Path, kind: str) -> None:
    out = files / "run"
    if kind == "directory":
        out.mkdir()
    elif kind == "file":
        out.write_text("precious")
    else:
        out.symlink_to(files / "nowhere")
    before = snapshot(files)
    assert is_refusal(run(*words(files)))
    assert snapshot(files) == before


@pytest.mark.parametrize("name", ["train.txt", "train.xlsx", "train", "train.csv.zip"])
def test_a_wrong_extension_is_refused(run: Run, files: Path, name: str) -> None:
    (files / name).write_text(GOOD)
    result = run(*words(files)[:1], files / name, *words(files)[2:])
    assert is_refusal(result)
    assert ".parquet" in result.err


@pytest.mark.parametrize("kind", ["npz", "parquet", "csv.gz"])
def test_garbage_with_a_good_extension_is_refused(run: Run, files: Path, kind: str) -> None:
    path = files / f"train.{kind}"
    path.write_bytes(b"PK\x03\x04 garbage" * 50)
    before = snapshot(files)
    assert is_refusal(run(*words(files)[:1], path, *words(files)[2:]))
    assert snapshot(files) == before


def test_a_pickle_in_an_npz_is_not_opened(run: Run, files: Path) -> None:
    """Catches a loader that runs code out of a data file."""
    np.savez(files / "train.npz", x_train=np.array([{"a": 1}] * 4, dtype=object), y_train=np.arange(4))
    assert is_refusal(run(*words(files)[:1], files / "train.npz", *words(files)[2:]))


def test_the_first_record_of_a_file_without_a_header_is_not_shown(run: Run, files: Path) -> None:
    """It stands where names of columns would, which a refusal lists."""
    for text in ("61.5,0.25,ZANZIBAR,yes\n" + GOOD.partition("\n")[2], "61.5;0.25;ZANZIBAR;yes\n"):
        (files / "train.csv").write_text(text)
        for words_of in (words(files), ("facts", files / "train.csv"), words(files, "--target", "ill")):
            result = run(*words_of)
            assert result.code != 0
            assert "ZANZIBAR" not in result.out + result.err
            assert "61.5" not in result.out + result.err


def test_integers_of_5000_digits_in_facts_are_refused(run: Run, files: Path) -> None:
    """Python does not turn them into numbers, nor back into texts."""
    facts = (files / "facts.toml").read_text()
    before = snapshot(files)
    for line in (f"records = {'9' * 5000}", f"records = {'0b' + '1' * 20000}", f"classes = -{'7' * 5000}"):
        (files / "facts.toml").write_text(f"{line}\n{facts}")
        result = run(*words(files))
        assert is_refusal(result), result
        assert len(result.err) < 1000
    (files / "facts.toml").write_text(facts)
    assert snapshot(files) == before


@pytest.mark.parametrize("name", ["x_train", "x_train.npy", "../x_train.npy", "notes.txt"])
def test_members_of_an_npz_that_are_no_arrays_are_refused(run: Run, files: Path, name: str) -> None:
    with zipfile.ZipFile(files / "train.npz", "w") as whole:
        whole.writestr(name, b"raw bytes")
    before = snapshot(files)
    result = run("fit", files / "train.npz", "--epsilon", 2, "--delta", 1e-3, "--assume-public", "--out", files / "run")
    assert is_refusal(result), result
    assert snapshot(files) == before


def test_bad_input_to_predict(run: Run, files: Path) -> None:
    assert run(*words(files)).code == 0
    out = ("--out", files / "p.csv")
    new = files / "new.csv"
    before = snapshot(files)
    assert is_refusal(run("predict", files / "absent", files / "test.csv", *out))
    assert is_refusal(run("predict", files / "train.csv", files / "test.csv", *out))
    assert is_refusal(run("predict", files / "run", files / "absent.csv", *out))
    assert is_refusal(run("predict", files / "run", files / "test.csv", "--out", files / "absent" / "p.csv"))
    assert is_refusal(run("predict", files / "run", files / "test.csv", "--out", files))
    assert is_refusal(run("predict", files / "run", files / "test.csv", *out, "--level", 1))
    assert is_refusal(run("predict", files / "run", "digits", *out))
    assert snapshot(files) == before
    for text in ("", "age,dose\n1,2\n", "age,dose,ward\nold,0.5,north\n", "age,dose,ward\nnan,0.5,north\n"):
        new.write_text(text)
        assert is_refusal(run("predict", files / "run", new, *out)), text
    assert not (files / "p.csv").exists()


def test_a_posterior_that_was_changed_is_not_used(run: Run, files: Path) -> None:
    assert run(*words(files)).code == 0
    path = files / "run" / "posterior.safetensors"
    path.write_bytes(bytes([*path.read_bytes()[:-1], path.read_bytes()[-1] ^ 1]))
    refused = run("predict", files / "run", files / "test.csv", "--out", files / "p.csv")
    assert is_refusal(refused)
    assert "SHA-256" in refused.err


# Property-based: whatever is typed, the answer is an exit code out of the list and one sentence.

NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True).map(repr),
    st.integers(-(10**20), 0).map(str),
    st.sampled_from(["", "-0", "1e400", "0x10", "1,5", "nan", "-inf", "true", "None", "--", "\n", "'"]),
)
TEXTS = st.text(st.characters(blacklist_characters="\x00", blacklist_categories=("Cs",)), max_size=12)
# Each is wrong for this command line whatever its value, once harmless values have been filtered out.
WRONG: dict[str, st.SearchStrategy[str]] = {
    "--epsilon": NUMBERS.filter(lambda text: not _positive(text)),
    "--delta": st.one_of(NUMBERS.filter(lambda text: not _positive(text)), st.floats(0.009, 1e300).map(repr)),
    "--clip": NUMBERS.filter(lambda text: not _positive(text)),
    "--noise-scale": NUMBERS.filter(lambda text: not _positive(text)),
    "--prior-scale": NUMBERS.filter(lambda text: not _positive(text)),
    "--steps": NUMBERS.filter(lambda text: not _whole(text)),
    "--batch": st.one_of(NUMBERS.filter(lambda text: not _whole(text)), st.integers(121, 10**15).map(str)),
    "--seed": st.one_of(st.integers(max_value=-1), st.integers(min_value=2**31 + 1)).map(str),
    "--method": TEXTS.filter(lambda text: text not in ("sgd", "sgld")),
    "--sampling": TEXTS,
    "--adjacency": TEXTS,
    "--task": TEXTS,
    "--hidden": TEXTS.filter(lambda text: text.strip() and not text.replace(",", "").strip().isdigit()),
    "--set": TEXTS.filter(lambda text: not text.startswith(("decay=", "burn_in=", "step_size=", "thinning="))),
    "--target": TEXTS.filter(lambda text: text.strip() not in ("", "ill", "ward", "age", "dose")),
    "--facts": TEXTS,
    "--test": TEXTS,
    "--split": st.integers().map(str),
    "--epochs": st.floats(1, 10).map(repr),
}


def _positive(text: str) -> bool:
    try:
        return float(text) > 0 and float(text) < float("inf")
    except ValueError:
        return False


def _whole(text: str) -> bool:
    try:
        return float(text) > 0 and float(text).is_integer()  # "2.0" is taken for 2
    except (ValueError, OverflowError):
        return False


@pytest.fixture(scope="module")
def fixed_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "train.csv").write_text(GOOD)
    (folder / "facts.toml").write_text(FACTS)
    Ledger(folder / "budget.db").close()
    return folder


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_wrong_value_is_told_in_one_sentence(fixed_files: Path, data: st.DataObject) -> None:
    """Catches a traceback, a box, a second line, a value that slips through to the fit, and a charge for nothing."""
    option = data.draw(st.sampled_from(sorted(WRONG)))
    value = data.draw(WRONG[option])
    before = snapshot(fixed_files)
    result = call(*words(fixed_files), f"{option}={value}")
    assert is_refusal(result), (option, value, result)
    assert snapshot(fixed_files) == before


CELLS = st.one_of(
    st.sampled_from(["", "nan", "inf", "-inf", "?", "NULL", "1e999", "yes", "north", '"', "'", "0", "50", "1e-400"]),
    TEXTS.map(lambda text: text.replace(",", "").replace("\n", "").replace("\r", "").replace('"', "")),
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lines=st.lists(st.lists(CELLS, min_size=1, max_size=5), min_size=0, max_size=30),
    header=st.sampled_from(["age,dose,ward,ill", "age,dose,ill", "", "age,age,ward,ill", "a", "age,dose,ward,ill,"]),
)
def test_any_small_table_is_told_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, lines: list[list[str]], header: str
) -> None:
    """A sampling that makes the number of records public, so that nothing here can be fitted."""
    folder = tmp_path_factory.mktemp("table")
    text = "\n".join([header, *(",".join(line) for line in lines)])
    (folder / "train.csv").write_bytes(text.encode("utf-8", "surrogatepass"))
    (folder / "facts.toml").write_text(FACTS)
    before = snapshot(folder)
    result = call(*words(folder, "--sampling", "fixed-size", "--adjacency", "replace-one"))
    assert is_refusal(result), result
    assert snapshot(folder) == before


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=400))
def test_any_bytes_as_a_table_a_ledger_or_facts(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    kind = ("train.csv", "budget.db", "facts.toml", "train.npz", "train.parquet")[len(content) % 5]
    (folder / "train.csv").write_text(patients(20, 0))
    (folder / "facts.toml").write_text(FACTS)
    (folder / kind).write_bytes(content)
    before = snapshot(folder)
    source = folder / kind if kind.startswith("train") else folder / "train.csv"
    result = call("fit", source, *words(folder)[2:])
    assert is_refusal(result), (kind, result)
    assert snapshot(folder) == before


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    arguments=st.lists(st.one_of(st.sampled_from(["account", "plan", "ledger", "--json", "--rate"]), TEXTS), max_size=5)
)
def test_any_words_end_with_a_known_exit_code(arguments: list[str]) -> None:
    if {"show", "limit", "predict", "fit"} & set(arguments):
        return
    result = call(*arguments)
    assert result.code == 0 or is_refusal(result), (arguments, result)


def test_nothing_of_this_needs_the_network_or_home(monkeypatch: pytest.MonkeyPatch, run: Run, files: Path) -> None:
    """A refusal must not depend on the environment of the user."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setitem(os.environ, "CONFIDE_DATA", "")
    result = run("fit", "adult", "--epsilon", 1, "--out", files / "run")
    assert is_refusal(result)
    assert "--data DIR" in result.err
