"""The engine against ordinary autograd, record by record, on every animal of the zoo."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from confide.layers.bayesian import draw_
from confide.mechanism.clipping import calls, chain, clipped_sum, engine, factors, structure
from confide.mechanism.clipping.factors import Style
from confide.mechanism.clipping.reference import per_record_gradients, reference_clipped_sum
from confide.mechanism.clipping.rules import tied
from confide.mechanism.clipping.structure import kept_generators
from tests.mechanism.clipping.zoo import ZOO
from tests.mechanism.clipping.zoo_tools import layers_with_noise_by_row

# torch warns of the copy it makes for paddings that are not symmetric; the zoo has one on purpose
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
]
TOLERANCE = 1e-12


def compare(name: str, style: Style = "flat", quantile: float = 0.5, **options: Any) -> float:
    """The largest relative difference of sums and norms; half of the records are clipped."""
    animal = ZOO[name]
    module, loss, x, y = animal.case()
    size = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    found, wanted = torch.ones(2, size, dtype=torch.float64)  # something is in the buffer already: it must stay
    with kept_generators(module):
        torch.manual_seed(1)
        gradients = per_record_gradients(module, loss, x, y, animal.masks)
    clip = gradients.norm(dim=1).quantile(quantile).item()
    with kept_generators(module):
        torch.manual_seed(1)
        expected = reference_clipped_sum(
            module, loss, x, y, clip=clip, out=wanted, style=style, same_masks=animal.masks
        )
    by_row = name.endswith("with_dropout") or bool(layers_with_noise_by_row(module))
    with kept_generators(module), as_many_rows() if by_row else nullcontext():
        torch.manual_seed(1)
        norms = clipped_sum(module, loss, x, y, clip=clip, out=found, style=style, **options)
    return max(relative(found - 1, wanted - 1), ((norms - expected).abs() / expected.clamp(min=1e-9)).max().item())


def as_many_rows() -> Any:
    """As records: rows that fill a batch up draw too, and the others then get other numbers than the reference."""
    return patch.object(engine, "even_size", lambda records, rows=1: records)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def test_zoo_is_large_enough() -> None:
    assert len(ZOO) >= 60


@pytest.mark.parametrize("name", ZOO)
def test_flat_clipping_equals_autograd(name: str) -> None:
    assert compare(name) < TOLERANCE


# With a copied parameter and hardly any memory the records go in pieces, and pieces draw their masks in another order.
IN_PIECES_WITH_MASKS = {"bare_matrix_under_dropout"}


@pytest.mark.parametrize("name", [name for name in ZOO if name not in IN_PIECES_WITH_MASKS])
def test_smallest_memory_budget_is_exact(name: str) -> None:
    """Every rule also has a way that stores nothing; a wrong one would show here and not above."""
    assert compare(name, memory_budget=1) < TOLERANCE


SAMPLE = ["mlp", "residual_network", "transformer", "lstm", "tied_weights", "weight_used_outside_its_layer",
          "bare_parameter", "mean_field_4_draws", "variational_dropout_images_1_draws",
          "module_used_twice"]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("style", ["per-layer", "automatic"])
def test_other_styles_equal_autograd(name: str, style: Style) -> None:
    assert compare(name, style) < TOLERANCE


@pytest.mark.parametrize("name", ["mlp", "mnist_network", "tied_weights", "cross_attention", "mean_field_4_draws"])
def test_micro_batches_are_exact(name: str) -> None:
    """Eight records in pieces of three: the last piece is smaller, and the norms keep their order."""
    assert compare(name, micro_batch=3) < TOLERANCE


@pytest.mark.parametrize("name", ["mnist_network", "transformer", "tied_weights", "lstm", "mean_field_4_draws"])
def test_batches_that_would_hold_too_much_go_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By themselves, and exactly: eight records in two pieces of four."""
    monkeypatch.setattr(engine, "HELD_BYTES", 1)
    monkeypatch.setattr(engine, "fewest_rows", lambda held: 4)
    pieces = []
    whole = engine.Engine._tried

    def piece(self: engine.Engine, plan: Any, examined: Any, asked: engine.Batch, bound: Any) -> Tensor | None:
        pieces.append(asked.records)
        return whole(self, plan, examined, asked, bound)

    monkeypatch.setattr(engine.Engine, "_tried", piece)
    assert compare(name) < TOLERANCE
    assert pieces == [4, 4]


@pytest.mark.parametrize("memory_budget", [1, 1 << 28])
@pytest.mark.parametrize("name", [name for name in ZOO if name.startswith("variational_dropout")])
def test_noise_from_a_generator_of_ones_own_is_common_to_all_records(name: str, memory_budget: int) -> None:
    """Every record has the noise that it has alone: noise by row would follow a record's place."""
    module, loss, x, y = ZOO[name].case()
    draw_(module, torch.Generator().manual_seed(5), module.zoo_draws)  # type: ignore[arg-type]
    found, wanted, by_row = torch.zeros(3, sum(value.numel() for value in module.parameters()), dtype=torch.float64)
    clip, norms = 0.1, []
    for record in range(len(y)):
        with kept_generators(module):
            norms += reference_clipped_sum(module, loss, x[[record]], y[[record]], clip=clip, out=wanted)
    with kept_generators(module):
        reference_clipped_sum(module, loss, x, y, clip=clip, out=by_row)
    with kept_generators(module):
        answered = clipped_sum(module, loss, x, y, clip=clip, out=found, memory_budget=memory_budget)
    assert relative(found, wanted) < TOLERANCE
    torch.testing.assert_close(answered, torch.stack(norms), rtol=TOLERANCE, atol=0)
    assert relative(by_row, wanted) > 0.1  # what is caught


def test_nothing_is_clipped_below_the_bound() -> None:
    assert compare("mlp", quantile=1.0) < TOLERANCE


def test_float32_agrees_to_rounding() -> None:
    module, loss, x, y = ZOO["residual_network"].case()
    module, x = module.float(), x.float()
    size = sum(parameter.numel() for parameter in module.parameters())
    found, wanted = torch.zeros(2, size)
    clipped_sum(module, loss, x, y, clip=0.5, out=found)
    reference_clipped_sum(module, loss, x, y, clip=0.5, out=wanted)
    assert relative(found, wanted) < 1e-4


def test_buffer_of_another_type() -> None:
    """float32 parameters, float64 sum: through a scratch copy, still onto what is there."""
    module, loss, x, y = ZOO["mlp"].case()
    size = sum(parameter.numel() for parameter in module.parameters())
    wanted, found = torch.ones(2, size, dtype=torch.float64)
    clipped_sum(module, loss, x, y, clip=0.5, out=wanted)
    clipped_sum(module.float(), loss, x.float(), y, clip=0.5, out=found)
    assert relative(found - 1, wanted - 1) < 1e-4


@pytest.mark.parametrize("name", ["mnist_network", "linear_on_long_sequences", "transformer", "mean_field_4_draws"])
def test_steps_do_not_remember_each_other(name: str) -> None:
    """Memory is kept between steps, for batches of changing size: nothing of an old batch may stay in a new sum."""
    module, loss, x, y = ZOO[name].case()
    size = sum(parameter.numel() for parameter in module.parameters())
    for records in (3, 6, 1, 5):
        found, wanted = torch.zeros(2, size, dtype=torch.float64)
        norms = clipped_sum(module, loss, x[:records], y[:records], clip=0.1, out=found)
        expected = reference_clipped_sum(module, loss, x[:records], y[:records], clip=0.1, out=wanted)
        assert relative(found, wanted) < TOLERANCE
        torch.testing.assert_close(norms, expected, rtol=TOLERANCE, atol=0)


# broken variants must be caught ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "dilated_convolution"])
def test_a_clip_one_percent_off_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = factors.shrunk
    for place in (factors, chain):
        monkeypatch.setattr(place, "shrunk", lambda clip, dtype: honest(1.01 * clip, dtype))
    assert compare(name) > 1e-3


def test_a_missed_call_of_a_reused_module_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_the_first(self: calls.Cluster) -> None:
        self.members = self.members[:1]

    monkeypatch.setattr(calls.Cluster, "merge", only_the_first)
    monkeypatch.setattr(structure, "_missed", lambda *_: frozenset())
    assert compare("module_used_twice") > 1e-3


def test_cross_terms_of_tied_weights_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding squared norms of layers that share a weight, as if it were two weights, is wrong and is seen."""
    monkeypatch.setattr(calls, "_disjoint", lambda targets: True)
    assert compare("tied_linear_layers") > 1e-3


@pytest.mark.parametrize("name", ["tied_weights", "tied_words_and_a_bias"])
def test_a_table_that_is_also_a_weight_has_cross_terms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are neither formed record by record nor left out."""
    monkeypatch.delattr(calls.Cluster, "_dense_norms")
    assert compare(name) < TOLERANCE
    monkeypatch.setattr(tied, "crossed", lambda rows, left, right: left.new_zeros(len(left)))
    assert compare(name) > 1e-4


def test_per_layer_groups_share_the_bound() -> None:
    """Per-layer clipping at C per layer would have sensitivity C sqrt(K); at C / sqrt(K) it is C."""
    module, loss, x, y = ZOO["mlp"].case()
    size = sum(parameter.numel() for parameter in module.parameters())
    sums = {}
    for clip in (1e-4, 1e-4 * 3**0.5):  # three layers; the second clip is per-layer clipping accounted as flat
        sums[clip] = torch.zeros(size, dtype=torch.float64)
        clipped_sum(module, loss, x[:1], y[:1], clip=clip, out=sums[clip], style="per-layer")
    honest, broken = (total.norm().item() for total in sums.values())
    assert 0.99e-4 < honest <= 1e-4
    assert broken > 1.7e-4
