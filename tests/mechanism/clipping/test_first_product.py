"""The library of products listens at the first product of a process: confide asks before, in every process it makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from confide.mechanism.clipping.evenly import asked_too_late
from confide.mechanism.clipping.places import TOO_LATE

LINEAR_MODEL = """
import confide
from confide.mechanism.clipping.evenly import asked_too_late
from confide.mechanism.clipping.places import assumed_of_places, hearing_of_uneven
from confide.models.likelihoods import Categorical
from confide.mechanism.clipping import clipped_sum
import json, sys, torch
from torch import nn

def moved(module, x):
    sums = []
    for some in (x, x[1:].clone()):
        out = torch.zeros(sum(value.numel() for value in module.parameters()))
        clipped_sum(module, Categorical(3).loss, some, torch.zeros(len(some)).long(), clip=1.0, out=out)
        sums.append(out.double())
    return float((sums[0] - sums[1]).norm())

torch.manual_seed(0)
torch.set_num_threads(1)
module = nn.Sequential(nn.Linear(65, 8), nn.Tanh(), nn.Linear(8, 3))
with torch.no_grad():
    module[0].weight.copy_(module[0].weight[:, :1].expand(-1, 65))
generator = torch.Generator().manual_seed(1)
half = torch.randn(32, dtype=torch.float64, generator=generator)
one = torch.cat([half, -half]) * (30 * 2.0**23)
one[0] += 1
x = torch.zeros(41, 65)
x[4::4, :64] = one[torch.randperm(64, generator=generator)].float()
with hearing_of_uneven() as uneven:
    far = moved(module, x)
print(json.dumps([asked_too_late(), far, assumed_of_places(bool(uneven))]))
"""
PRODUCT = "import torch; torch.ones(4, 4) @ torch.ones(4, 4)\n"
CHILDREN = """
import multiprocessing, sys
from confide.mechanism.clipping.evenly import asked_too_late

if __name__ == "__main__":
    for kind in ("spawn", "forkserver"):
        with multiprocessing.get_context(kind).Pool(1) as pool:
            assert pool.apply(asked_too_late) is False, kind
    from joblib import Parallel, delayed
    assert Parallel(2)(delayed(asked_too_late)() for _ in range(2)) == [False, False]
    print("true")
"""


def said_by(script: str, *place: str) -> Any:
    """By a process that nobody has told anything."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run([sys.executable, *(place or ("-c", script))], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_was_asked_here() -> None:
    assert not asked_too_late()
    assert os.environ["MKL_CBWR"]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="another library makes the products")
def test_a_product_before_the_import_is_stated() -> None:
    """The broken variant, in which ten hostile records move a sum by 13.7 C on a processor with long vectors."""
    late, far, stated = said_by(PRODUCT + LINEAR_MODEL)
    if late is False:
        pytest.skip("this build of torch does not say")
    assert far <= 1 + 1e-5 or stated == [TOO_LATE]


@pytest.mark.slow
def test_every_process_asks(tmp_path: Any) -> None:
    late, far, stated = said_by(LINEAR_MODEL)
    assert (late, stated) == (False, [])
    assert far <= 1 + 1e-5
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    assert said_by("", str(script)) is True
