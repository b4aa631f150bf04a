"""Exports: the same numbers without torch, without scikit-learn, and as a torch program."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confide.cli.app import main
from confide.data.preprocessing import Encoder
from confide.export.models import export_numpy, export_program, export_torch, mean_network
from confide.export.predictor.main import Predictor
from confide.layers.conversion import with_shared_dropout
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Probit
from confide.models.networks import mlp
from confide.posteriors.draws import Draws
from confide.posteriors.variational import DiagonalGaussian, DropoutNetwork
from confide.running.artefacts import save_run
from tests.report.runs import make_run, reals_schema


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def draws(likelihood: Any, outputs: int, activation: str = "relu") -> Draws:
    module = mlp(6, outputs, (5, 4), activation)
    size = sum(parameter.numel() for parameter in module.parameters())
    return Draws(module, likelihood, 0.7 * randn(7, size), torch.arange(1.0, 8.0) / 28)


def gaussian() -> DiagonalGaussian:
    posterior = draws(Categorical(3), 3)
    centre, spread = posterior.draws[0], 0.1 * posterior.draws[1].abs()
    return DiagonalGaussian(posterior.module, posterior.likelihood, centre, spread, 8)


def dropout() -> DropoutNetwork:
    posterior = draws(Categorical(3), 3)
    network, _ = with_shared_dropout(posterior.module, 0.3)
    return DropoutNetwork(network, posterior.likelihood, posterior.draws[0], 8, 0.3)


POSTERIORS: dict[str, Any] = {
    "classes": draws(Categorical(3), 3),
    "one logit": draws(Bernoulli(), 1, "tanh"),
    "probit": draws(Probit(), 1),
    "numbers": draws(Gaussian(0.3), 1, "gelu"),
    "learnt noise": draws(HeteroscedasticGaussian(), 2),
    "gaussian": gaussian(),
    "dropout": dropout(),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", POSTERIORS)
def test_exports_give_the_same_numbers(name: str, kind: str, tmp_path: Path) -> None:
    posterior, x = POSTERIORS[name], randn(11, 6)
    write, file = (export_numpy, "draws.npz") if kind == "numpy" else (export_torch, "model.pt2")
    write(posterior, tmp_path / "out")
    found, expected = Predictor(str(tmp_path / "out" / file))(x.numpy()), posterior.summary(x)
    np.testing.assert_allclose(found.centre, expected.centre.numpy(), atol=1e-5)
    np.testing.assert_allclose(found.aleatoric, expected.aleatoric.numpy(), atol=1e-5)
    np.testing.assert_allclose(found.epistemic, expected.epistemic.numpy(), atol=1e-4)


def test_shipped_module_needs_numpy_alone(tmp_path: Path) -> None:
    """Run beside its draws in a process in which torch, scikit-learn and confide cannot be imported."""
    posterior, x = POSTERIORS["classes"], randn(11, 6)
    folder = export_numpy(posterior, tmp_path / "out")
    np.save(tmp_path / "x.npy", x.numpy())
    code = (
        "import sys\n"
        "for name in ('torch', 'sklearn', 'confide', 'scipy'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "import predict\n"
        "sys.exit(predict.main(sys.argv[1:]))"
    )
    words = [str(folder / "draws.npz"), str(tmp_path / "x.npy"), str(tmp_path / "p.npz")]
    subprocess.run([sys.executable, "-c", code, *words], check=True)
    with np.load(tmp_path / "p.npz") as found:
        np.testing.assert_allclose(found["centre"], posterior.summary(x).centre.numpy(), atol=1e-6)


def test_units_of_the_target_are_kept(tmp_path: Path) -> None:
    run = make_run(reals_schema())
    encoder = Encoder(run.schema)
    export_numpy(run.posterior, tmp_path / "out", encoder)
    x = randn(5, 3)
    found = Predictor(str(tmp_path / "out" / "draws.npz"))(x.numpy())
    expected = run.posterior.summary(x).rescaled(encoder.target_scale, encoder.target_centre)
    np.testing.assert_allclose(found.centre, expected.centre.numpy(), rtol=1e-5)
    np.testing.assert_allclose(found.aleatoric, expected.aleatoric.numpy(), rtol=1e-5)


@pytest.mark.parametrize("name", ["classes", "gaussian", "dropout"])
def test_program_is_the_network_at_the_mean(name: str, tmp_path: Path) -> None:
    posterior, x = POSTERIORS[name], randn(11, 6)
    path = export_program(posterior, tmp_path / "mean.pt2", torch.zeros(2, 6))
    program = torch.export.load(path).module()
    torch.testing.assert_close(program(x), mean_network(posterior)(x))
    torch.testing.assert_close(program(x[:1]), mean_network(posterior)(x[:1]))


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(10, 3))
    size = sum(parameter.numel() for parameter in network.parameters())
    convolution = Draws(network, Categorical(3), randn(2, size), torch.full((2,), 0.5))
    with pytest.raises(ValueError, match="not a chain of linear layers"):
        export_numpy(convolution, tmp_path / "out")
    export_program(convolution, tmp_path / "c.pt2", torch.zeros(2, 1, 6))
    with pytest.raises(ValueError, match="exists already"):
        export_program(convolution, tmp_path / "c.pt2", torch.zeros(2, 1, 6))
    with pytest.raises(ValueError, match=r"\.pt2"):
        export_program(convolution, tmp_path / "c.onnx", torch.zeros(2, 1, 6))
    with pytest.raises(ValueError, match="at least 2 inputs"):
        export_program(convolution, tmp_path / "d.pt2", torch.zeros(1, 1, 6))
    odd = Draws(nn.Sequential(nn.Linear(6, 3), nn.ELU()), Categorical(3), randn(2, 21), torch.full((2,), 0.5))
    with pytest.raises(ValueError, match="ELU"):
        export_numpy(odd, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    folder = export_numpy(POSTERIORS["classes"], tmp_path / "out")
    with pytest.raises(ValueError, match="need 6 features"):
        Predictor(str(folder / "draws.npz"))(np.zeros((3, 5)))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(reals_schema())
    save_run(run, tmp_path / "run", encoder=Encoder(run.schema))
    for kind, file in (("numpy", "draws.npz"), ("torch", "model.pt2")):
        assert main(["export", str(tmp_path / "run"), "--to", kind, "--out", str(tmp_path / kind), "--json"]) == 0
        assert sorted(path.name for path in (tmp_path / kind).iterdir()) == sorted(
            [file, "predict.py", "MODEL_CARD.md"]
        )
    for words in (("--out", "numpy"), ("--to", "pickle", "--out", "x")):
        *options, target = words
        assert main(["export", str(tmp_path / "run"), *options, str(tmp_path / target)]) == 2
    capsys.readouterr()


HEADERS = (b"{'descr': '<f8', (((", b"{'descr': '<f8', 'fortran_order': \x22\x22\x22,", b"{'descr': 7}", b"\xff\xfe")


@pytest.mark.parametrize("header", HEADERS)
def test_a_damaged_header_is_refused_in_one_sentence(tmp_path: Path, header: bytes) -> None:
    """Numpy reads headers of arrays as Python literals: SyntaxError and TokenError come out of a damaged one."""
    path = tmp_path / "draws.npz"
    text = header.ljust(118) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64))
    with pytest.raises(ValueError, match=r"path='.*draws\.npz': cannot be read \(\w+\); export the model again"):
        Predictor(str(path))


def test_other_damaged_exports(tmp_path: Path) -> None:
    path = tmp_path / "draws.npz"
    path.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        Predictor(str(path))
    np.savez(path, about=np.array("[1, 2"), weights=np.ones(3))
    with pytest.raises(ValueError, match="does not say what it holds"):
        Predictor(str(path))
    np.savez(path, about=np.array('{"format": 2}'), weights=np.ones(3))
    with pytest.raises(ValueError, match="weights are missing"):
        Predictor(str(path))
    with pytest.raises(FileNotFoundError):
        Predictor(str(tmp_path / "nowhere.npz"))
