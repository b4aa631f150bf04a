"""Features of pictures: any size, several channels, one record at a time; folders of pictures; pixel ranges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from confide.data import Encoder, Schema, load_dataset, load_table
from confide.data.pictures import LENGTH, PictureFeatures, image_shape, is_picture
from confide.data.table import Table
from confide.errors import DataError


def _pictures(shape: tuple[int, ...], rows: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "shape", [(1, 28, 28), (1, 8, 8), (1, 9, 17), (3, 32, 32), (3, 64, 64), (1, 5, 31), (4, 33, 30), (1, 100, 4)]
)
def test_any_size_has_features_of_one_length(shape: tuple[int, int, int]) -> None:
    made = PictureFeatures(*shape)
    found = made(_pictures(shape))
    assert found.shape == (3, made.count)
    torch.testing.assert_close(found.norm(dim=1), torch.full((3,), LENGTH), atol=1e-3, rtol=0)


def test_a_picture_of_one_colour_is_finite_and_grey_has_no_contrast() -> None:
    made = PictureFeatures(3, 16, 16)
    assert bool(torch.isfinite(made(torch.zeros(1, 3, 16, 16))).all())
    grey = _pictures((1, 16, 16)).expand(-1, 3, -1, -1)
    of_contrasts = made(grey)[:, 81 * 16 :]
    assert float(of_contrasts.abs().max()) < 1e-3


def test_colour_alone_tells_two_pictures_apart() -> None:
    """Catches contrasts that are left out: both have the same mean over their channels."""
    one = torch.zeros(1, 3, 16, 16)
    one[:, 0, :, :8] = 0.9
    other = one.flip(1)
    made = PictureFeatures(3, 16, 16)
    assert float((made(one) - made(other)).norm()) > 1


def test_a_tint_of_the_whole_picture_is_told() -> None:
    """Catches contrasts that are told without their mean alone: these differ by a tint and by nothing else."""
    pictures = 0.3 + 0.2 * _pictures((1, 16, 16), rows=40).expand(-1, 3, -1, -1)
    red, blue = (torch.tensor(colour)[:, None, None] for colour in ((0.1, 0.0, -0.1), (-0.1, 0.0, 0.1)))
    made = PictureFeatures(3, 16, 16)
    apart = (made(pictures + red) - made(pictures + blue)).mean(0)
    assert float(apart.norm()) > 0.1 * LENGTH


def test_one_record_does_not_touch_another() -> None:
    made = PictureFeatures(3, 20, 13)
    pictures = _pictures((3, 20, 13), rows=40)
    alone, changed = made(pictures), pictures.clone()
    changed[1:] = torch.nan
    torch.testing.assert_close(made(changed)[0], alone[0], atol=1e-5, rtol=1e-5)
    assert bool(torch.isnan(made(changed)[1:]).all())


def test_what_is_a_picture() -> None:
    assert is_picture((28, 28))
    assert is_picture((32, 32, 3))
    assert is_picture((3, 32, 32))
    assert not is_picture((64,))
    assert not is_picture((2, 28))
    assert not is_picture((64, 64, 64))
    assert not is_picture(None)
    assert image_shape((32, 40, 3)) == (3, 32, 40)
    assert image_shape((3, 32, 40)) == (3, 32, 40)
    assert image_shape((1, 28, 28)) == image_shape((28, 28, 1)) == (1, 28, 28)
    assert image_shape((24, 20, 2)) == image_shape((2, 24, 20)) == (2, 24, 20)
    assert image_shape((16, 16, 5)) == (5, 16, 16)
    assert image_shape((4, 16, 3)) == (3, 4, 16)


def test_the_encoder_gives_the_same_features_for_channels_first_and_last() -> None:
    last = (255 * _pictures((12, 12, 3)).numpy()).astype(np.uint8)
    first = np.moveaxis(last, -1, 1)
    facts = {"classes": 2, "bounds": (0, 255), "records": 3}
    of_last = Encoder(Schema(shape=(12, 12, 3), **facts), "features").features(last)
    of_first = Encoder(Schema(shape=(3, 12, 12), **facts), "features").features(first)
    np.testing.assert_allclose(of_last, of_first, atol=1e-5)
    encoder = Encoder(Schema(shape=(12, 12, 3), **facts), "features")
    assert encoder.output_shape == of_last.shape[1:]
    assert Encoder.from_dict(encoder.to_dict()) == encoder


def test_a_pixel_that_is_no_number_is_refused_for_predictions_and_counts_for_nothing_in_training() -> None:
    pictures = _pictures((12, 12)).numpy().astype(np.float64)
    pictures[1, 3, 3] = np.nan
    encoder = Encoder(Schema(shape=(12, 12), classes=2, bounds=(0, 1), records=3), "features")
    with pytest.raises(DataError, match="missing or non-finite"):
        encoder.features(pictures)
    x, _ = encoder.training(Table.from_arrays(pictures, [0, 1, 0]))
    assert np.isnan(x[1]).all()
    assert np.isfinite(x[[0, 2]]).all()


# -- folders -----------------------------------------------------------------------------------------------------------


def _write(path: Path, size: tuple[int, int], value: int, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(path)


def test_classes_are_sub_folders_and_pictures_get_the_declared_size(tmp_path: Path) -> None:
    _write(tmp_path / "cat" / "1.png", (40, 40), 10)
    _write(tmp_path / "dog" / "1.ppm", (8, 6), 200, "RGB")
    table = load_table(tmp_path, schema=Schema(shape=(12, 10)))
    assert table.block is not None
    assert table.block.shape == (2, 12, 10)
    assert table.block.dtype == np.uint8
    assert table.block[0].max() == 10
    assert table.labels is not None
    assert table.labels.tolist() == ["cat", "dog"]
    colours = load_table(tmp_path, schema=Schema(shape=(12, 10, 3)))
    assert colours.block is not None
    assert colours.block.shape == (2, 12, 10, 3)
    assert colours.block[1, 0, 0].tolist() == [200, 0, 0]


def test_labels_may_stand_in_a_file_and_parts_in_folders(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for number in range(2):
            _write(tmp_path / part / f"{number}.png", (8, 8), number)
        (tmp_path / part / "labels.csv").write_text("file,label\n1.png,b\n0.png,a\n")
    found = load_dataset(tmp_path, schema=Schema(shape=(8, 8)))
    assert found.train.labels is not None
    assert found.train.labels.tolist() == ["a", "b"]
    assert found.test is not None
    assert found.test.rows == 2


def test_what_cannot_be_read_counts_for_nothing_when_learnt_from_and_is_refused_when_predicted(tmp_path: Path) -> None:
    """An error about one private picture would tell of it."""
    _write(tmp_path / "a" / "1.png", (8, 8), 1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.png").write_bytes(b"no picture")
    table = load_table(tmp_path, schema=Schema(shape=(8, 8)))
    assert table.labels is not None
    assert table.labels.tolist() == ["a", None]
    with pytest.raises(DataError, match="picture 2 of 2 cannot be read"):
        load_table(tmp_path, schema=Schema(shape=(8, 8)), target_required=False)


def test_one_line_of_labels_changes_no_other(tmp_path: Path) -> None:
    """Bytes that are no text, a quote that is left open, a cell too long for the reader, a line that ends early."""
    for name in "1234567":
        _write(tmp_path / f"{name}.png", (8, 8), int(name))
    odd = [b"1.png,cat\xff", b'2.png,"cat', b"3.png," + b"x" * 200_000, b"4.png", b"5.png,cat\0"]
    lines = [b"file,label", *odd, b"6.png,dog", b"7.png,cat"]
    (tmp_path / "labels.csv").write_bytes(b"\n".join(lines))
    table = load_table(tmp_path, schema=Schema(shape=(8, 8)))
    assert table.labels is not None
    assert table.labels.tolist()[-2:] == ["dog", "cat"]
    assert not {"dog", "cat"} & set(table.labels.tolist()[:3])
    (tmp_path / "labels.csv").write_bytes(b"file,label\n")  # no picture has one: a note, as for any other label
    assert load_table(tmp_path, schema=Schema(shape=(8, 8))).labels is not None


def test_a_folder_without_a_declared_size_or_without_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="declare their size in the facts"):
        load_table(tmp_path)
    with pytest.raises(DataError, match="holds no pictures"):
        load_table(tmp_path, schema=Schema(shape=(8, 8)))
