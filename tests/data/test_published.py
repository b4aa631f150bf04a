"""CIFAR-10, SVHN and Year in the form in which they are published, as files that the test makes."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from confide.data import Encoder, catalogue, published
from confide.errors import DataError

RECORDS = 6


def cifar_archive(path: Path, parts: dict[str, bytes], folder: str = "cifar-10-batches-bin") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in parts.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def cifar_part(seed: int, largest: int = 9) -> bytes:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (RECORDS, published.CIFAR_RECORD), dtype=np.uint8)
    rows[:, 0] = np.arange(RECORDS) % (largest + 1)
    rows[0, 0] = largest
    return rows.tobytes()


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    names = (*published.CIFAR_TRAIN, published.CIFAR_TEST, "batches.meta.txt")
    cifar_archive(tmp_path / "cifar-10-binary.tar.gz", {name: cifar_part(at) for at, name in enumerate(names)})
    return tmp_path


def test_cifar(cifar: Path) -> None:
    found = catalogue.load("cifar10", cifar)
    assert found.test is not None
    assert (found.train.rows, found.test.rows) == (5 * RECORDS, RECORDS)
    assert found.schema is not None
    x, y = Encoder(found.schema, layout="image").encode(found.train)
    assert x.shape[0] == 5 * RECORDS
    assert np.abs(x).max() <= 1
    # The first record of the second part: its class, and the first pixel of each plane.
    raw = np.frombuffer(cifar_part(1), np.uint8)
    assert y is not None
    assert y[RECORDS] == raw[0]
    image = np.asarray(found.train.block)[RECORDS].reshape(32, 32, 3)
    assert image[0, 0].tolist() == raw[[1, 1 + 1024, 1 + 2048]].tolist()
    assert image[0, 1].tolist() == raw[[2, 2 + 1024, 2 + 2048]].tolist()


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"test_batch.bin": b"x" * 10}, "holds no data_batch_1.bin"),
        (dict.fromkeys((*published.CIFAR_TRAIN, published.CIFAR_TEST), b"x" * 10), "records of 3073 bytes"),
        (dict.fromkeys((*published.CIFAR_TRAIN, published.CIFAR_TEST), cifar_part(0, 99)), "not CIFAR-100"),
    ],
)
def test_other_archives_get_one_sentence(tmp_path: Path, parts: dict[str, bytes], complaint: str) -> None:
    cifar_archive(tmp_path / "cifar-10-binary.tar.gz", parts)
    with pytest.raises(DataError, match=complaint):
        catalogue.load("cifar10", tmp_path)


def test_no_archive_at_all(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"not an archive")
    with pytest.raises(DataError, match="cannot be read; get the published file anew"):
        catalogue.load("cifar10", tmp_path)


def svhn_file(path: Path, classes: np.ndarray, shape: tuple[int, ...] = (32, 32, 3)) -> np.ndarray:
    from scipy.io import savemat

    images = np.random.default_rng(0).integers(0, 256, (*shape, len(classes)), dtype=np.uint8)
    savemat(path, {"X": images, "y": classes.reshape(-1, 1).astype(np.uint8)})
    return images


def test_svhn(tmp_path: Path) -> None:
    images = svhn_file(tmp_path / "train_32x32.mat", np.array([1, 9, 10, 2]))
    with pytest.raises(DataError, match="test part in a file of its own"):
        catalogue.load("svhn", tmp_path)
    svhn_file(tmp_path / "test_32x32.mat", np.array([10, 3]))
    found = catalogue.load("svhn", tmp_path)
    assert found.test is not None
    assert found.train.labels is not None
    assert found.train.labels.tolist() == [1, 9, 0, 2], "the published class 10 is the digit 0"
    assert np.array_equal(np.asarray(found.train.block)[2].reshape(32, 32, 3), images[..., 2])


@pytest.mark.parametrize(
    ("classes", "shape", "complaint"),
    [(np.array([0, 1]), (32, 32, 3), "outside of 1 to 10"), (np.array([1, 2]), (32, 32, 1), "must hold X")],
)
def test_another_matlab_file(tmp_path: Path, classes: np.ndarray, shape: tuple[int, ...], complaint: str) -> None:
    svhn_file(tmp_path / "train_32x32.mat", classes, shape)
    with pytest.raises(DataError, match=complaint):
        catalogue.load("svhn", tmp_path)


def test_year(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [",".join([str(1950 + at), *(f"{value:.4f}" for value in rng.normal(0, 50, 90))]) for at in range(20)]
    with zipfile.ZipFile(tmp_path / "YearPredictionMSD.txt.zip", "w") as archive:
        archive.writestr("YearPredictionMSD.txt", "\n".join(rows))
    found = catalogue.load("year", tmp_path)
    assert found.test is not None
    assert found.schema is not None
    assert (found.train.rows, found.test.rows) == (18, 2), "the first records train, the last measure"
    x, y = Encoder(found.schema).encode(found.train)
    assert x.shape == (18, 90)
    assert y is not None
    assert np.abs(x).max() <= 1
    assert y[0] == pytest.approx((1950 - 1966) / 46)


def test_a_year_file_of_another_width(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "YearPredictionMSD.txt.zip", "w") as archive:
        archive.writestr("YearPredictionMSD.txt", "1990,1,2\n")
    with pytest.raises(DataError, match="get the published file anew"):
        catalogue.load("year", tmp_path)
