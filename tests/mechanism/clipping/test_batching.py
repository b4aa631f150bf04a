"""Functions that run on all records of a region in one call: the same as for every record alone, and seen by nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.errors import Refusal
from confide.mechanism.clipping import batching, clipped_sum, one_by_one, structure
from confide.mechanism.clipping.anatomy import anatomy_of
from confide.mechanism.clipping.isolation import NotIsolable, Region
from confide.mechanism.clipping.reference import reference_clipped_sum

RECORDS = 5
Call = Callable[..., Tensor]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def each(*shape: int) -> Tensor:
    """One tensor for every record."""
    return normal(RECORDS, *shape)


def hidden(rows: int) -> Tensor:
    return torch.rand(RECORDS, rows, 1, 6, 6) > 0.5


# a function, what every record has of its own, and what all have in common
CASES: dict[str, tuple[Call, tuple[Any, ...], tuple[Any, ...]]] = {
    "linear": (F.linear, (each(2, 7, 3),), (normal(4, 3), normal(4))),
    "linear_of_features": (F.linear, (each(3),), (normal(4, 3),)),
    "linear_with_a_vector": (F.linear, (each(2, 3),), (normal(3),)),
    "linear_with_own_weights": (F.linear, (each(2, 3), each(4, 3)), ()),
    "addmm": (lambda x, bias, weight: torch.addmm(bias, x, weight), (each(6, 3),), (normal(4), normal(3, 4))),
    "addmm_scaled": (lambda x, bias, w: torch.addmm(bias, x, w, beta=2), (each(6, 3),), (normal(4), normal(3, 4))),
    "addmm_onto_a_matrix": (lambda x, into, w: torch.addmm(into, x, w), (each(6, 3),), (normal(6, 4), normal(3, 4))),
    "layer_norm": (lambda x, *w: F.layer_norm(x, (3,), *w), (each(2, 7, 3),), (normal(3), normal(3))),
    "layer_norm_of_all": (lambda x: F.layer_norm(x, [2, 3], eps=0.1), (each(2, 3),), ()),
    "layer_norm_with_own": (lambda x, w: F.layer_norm(x, (3,), w), (each(2, 3), each(3)), ()),
    "group_norm": (lambda x, *w: F.group_norm(x, 2, *w), (each(2, 4, 5, 5),), (normal(4), normal(4))),
    "group_norm_turned": (lambda x: F.group_norm(x.transpose(1, 2), 2), (each(2, 5, 4),), ()),
    "cell": (
        lambda x, h, c, *weights: torch.cat(torch.lstm_cell(x, (h, c), *weights)),
        (each(2, 3), each(2, 4), each(2, 4)), (normal(16, 3), normal(16, 4), normal(16), normal(16)),
    ),
    "cell_with_own_weights": (
        lambda x, w, h, c, other: torch.lstm_cell(x, [h, c], w, other)[1],
        (each(2, 3), each(16, 3)), (normal(2, 4), normal(2, 4), normal(16, 4)),
    ),
    "cross_entropy": (
        lambda x, y: F.cross_entropy(x, y, reduction="none"), (each(2, 3), torch.randint(3, (RECORDS, 2))), (),
    ),
    "cross_entropy_of_positions": (
        lambda x, y: F.cross_entropy(x, y, reduction="none"), (each(2, 3, 4), torch.randint(3, (RECORDS, 2, 4))), (),
    ),
    "cross_entropy_ignored": (
        lambda x, y: F.cross_entropy(x, y.clone().fill_(-100), reduction="none"),
        (each(2, 3), torch.randint(3, (RECORDS, 2))), (),
    ),
    "cross_entropy_of_shares": (
        lambda x, y: F.cross_entropy(x, y.softmax(1), reduction="none"), (each(2, 3), each(2, 3)), (),
    ),
    "columns": (lambda a, b: torch.column_stack([a, b, b]), (each(4, 2), each(4)), ()),
    "gaussian": (lambda a, b, v: F.gaussian_nll_loss(a, b, v.abs(), full=True), (each(3), each(3), each(3)), ()),
    "gaussian_each": (
        lambda a, b, v: F.gaussian_nll_loss(a, b, v.square(), reduction="none", eps=0.5), (each(3), each(3)),
        (normal(3),),
    ),
    "pixels_last": (lambda x: x.contiguous(memory_format=torch.channels_last) + 1, (each(1, 2, 3, 3),), ()),
    "pixels_last_by_to": (lambda x: x.to(torch.float32, memory_format=torch.channels_last), (each(1, 2, 3, 3),), ()),
    "attention": (F.scaled_dot_product_attention, (each(1, 2, 6, 4), each(1, 2, 6, 4), each(1, 2, 6, 4)), ()),
    "attention_rows": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        (each(3, 2, 6, 4), each(3, 2, 6, 4), each(3, 2, 6, 4)), (),
    ),
    "attention_own_masks": (
        F.scaled_dot_product_attention, (each(3, 2, 6, 4), each(3, 2, 6, 4), each(3, 2, 6, 4), hidden(3)), ()
    ),
    "attention_one_mask": (
        F.scaled_dot_product_attention, (each(2, 2, 6, 4), each(2, 2, 6, 4), each(2, 2, 6, 4)), (normal(6, 6),)
    ),
    "attention_mask_of_rows": (
        F.scaled_dot_product_attention, (each(2, 2, 6, 4), each(2, 2, 6, 4), each(2, 2, 6, 4)), (normal(2, 1, 6, 6),)
    ),
    "attention_without_rows": (F.scaled_dot_product_attention, (each(2, 6, 4), each(2, 6, 4), each(2, 6, 4)), ()),
    "attention_shared_keys": (F.scaled_dot_product_attention, (each(1, 2, 6, 4),), (normal(1, 2, 9, 4),) * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_for_every_record_alone(name: str) -> None:
    function, own, common = CASES[name]
    wanted = torch.stack([function(*(value[record] for value in own), *common) for record in range(RECORDS)])
    region = Region(RECORDS)
    with region.entered():
        found = region.stacked(function(*map(region.wrap, own), *common))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "name", ["linear", "addmm", "layer_norm", "group_norm", "attention_own_masks", "cross_entropy"]
)
def test_all_records_go_through_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the cases above are about what this file does."""
    kernel = f"_{name.removesuffix('_own_masks')}_kernel"
    seen, honest = [], getattr(batching, kernel)
    monkeypatch.setattr(batching, kernel, lambda *given, **more: (seen.append(1), honest(*given, **more))[1])
    test_as_for_every_record_alone(name)
    assert seen == [1]


NORMS: dict[str, Callable[[Tensor], Any]] = {
    "function": lambda x: F.layer_norm(x, (RECORDS, 3)),
    "kernel": lambda x: torch.layer_norm(x, (RECORDS, 3)),
    "by_name": lambda x: torch.layer_norm(input=x, normalized_shape=[RECORDS, 3]),
    "native": lambda x: torch.native_layer_norm(x, (RECORDS, 3), None, None, 1e-5),
    "operator": lambda x: torch.ops.aten.native_layer_norm(x, [RECORDS, 3], None, None, 1e-5),
    "overload": lambda x: torch.ops.aten.layer_norm.default(x, [RECORDS, 3]),
    "root": lambda x: F.rms_norm(x, (RECORDS, 3)),
    "backward": lambda x: torch.ops.aten.native_layer_norm_backward(
        x, x, [RECORDS, 3], x.new_zeros(1, 1), x.new_ones(1, 1), None, None, [True, False, False]
    ),
    "groups": lambda x: F.group_norm(x, 1),
}


@pytest.mark.parametrize("name", NORMS)
def test_no_axis_of_the_records_is_normalised_over(name: str) -> None:
    """torch's own vmap lets a layer norm reach the axis that it hides."""
    features = each(3)
    with pytest.raises((NotIsolable, RuntimeError)), Region(RECORDS).entered() as region:
        NORMS[name](region.wrap(features))


UNWRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "circle": lambda x: F.pad(x, (-3, 2), mode="circular"),
    "circle by place": lambda x: F.pad(x, (2, -3), "circular"),
    "layer": lambda x: nn.CircularPad1d((-3, 2))(x),
    "reflected": lambda x: F.pad(x, (-1, 2), mode="reflect"),
    "operator": lambda x: torch.ops.aten._pad_circular(x, [-3, 2]),
    "unknown mode": lambda x: torch.grid_sampler_2d(x.view(1, 1, 4, 4), x.view(1, 2, 4, 2), 3, 0, False),
    "unknown edges": lambda x: torch.grid_sampler(x.view(1, 1, 4, 4), x.view(1, 2, 4, 2), 0, -1, False),
    "table": lambda x: torch._ctc_loss(x.view(4, 1, 4), torch.ones(1, 2).long(), [3], [2])[1],
    "packet": lambda x: torch.ops.aten.empty([4]),
    "overload": lambda x: torch.ops.aten.empty.memory_format([4]),
    "like": lambda x: torch.ops.aten.empty_like(x),
    "larger": lambda x: torch.ops.aten.resize_(torch.zeros(2), [9]),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_memory_that_nobody_has_written_to_is_not_shown(name: str) -> None:
    """Neither by an operator's own name nor by padding in a circle, for which torch reads its own unwritten result."""
    values = each(2, 8)
    with pytest.raises(NotIsolable, match="memory"), Region(RECORDS).entered() as region:
        UNWRITTEN[name](region.wrap(values))
    asked = one_by_one.Asked(lambda place: torch.zeros(1, 2, 8), lambda one: [UNWRITTEN[name](one)], [torch.zeros(1)])
    with pytest.raises(Refusal, match="memory that others wrote"):
        one_by_one._in_turn((), 1, asked, lambda place, found: None, strict=True)


def test_pads_that_write_all_of_their_result_stay() -> None:
    values = each(2, 8)
    with Region(RECORDS).entered() as region:
        x = region.wrap(values)
        assert F.pad(x, (-3, 2)).shape == (2, 7)
        assert F.pad(x, (3, 2), mode="circular").shape == (2, 13)


class Own(nn.Module):
    """Not on the list of what is proven."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.groups = nn.Linear(4, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = self.norm(self.first(x)).unsqueeze(1)
        looked = F.scaled_dot_product_attention(*[state.unsqueeze(1)] * 3)[:, 0]
        out: Tensor = self.last(self.groups(looked.transpose(1, 2)).squeeze(2))
        return out


def summed(module: nn.Module, with_reference: bool = False) -> Tensor:
    torch.manual_seed(0)
    x, y = normal(RECORDS, 4), torch.randint(3, (RECORDS,))
    out = torch.zeros(sum(value.numel() for value in module.parameters()), dtype=torch.float64)
    loss = lambda output, y: F.cross_entropy(output, y, reduction="none")  # noqa: E731
    (reference_clipped_sum if with_reference else clipped_sum)(module, loss, x, y, clip=0.5, out=out)
    return out


@pytest.mark.parametrize(("owner", "name"), [
    (F, "linear"), (F, "layer_norm"), (torch, "layer_norm"), (F, "group_norm"), (torch, "group_norm"),
    (F, "scaled_dot_product_attention"),
])  # fmt: skip
def test_what_somebody_put_in_a_place_of_torch_sees_one_record(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    module = Own().double()
    wanted, honest = summed(module, True), getattr(owner, name)
    torch.testing.assert_close(summed(module), wanted)  # examined

    def mixing(values: Tensor, *rest: Any, **more: Any) -> Tensor:
        found: Tensor = honest(values, *rest, **more)
        return found if len(values) == 1 else found.flip(0)

    monkeypatch.setattr(owner, name, mixing)
    torch.testing.assert_close(summed(module), wanted)


def test_such_a_function_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a kernel that is looked up where somebody can put another."""
    torch.manual_seed(1)
    module = Own().double()
    wanted = summed(module)
    honest = batching._linear_kernel
    monkeypatch.setattr(batching, "_linear_kernel", lambda values, *rest: honest(values.flip(0), *rest))
    assert not torch.allclose(summed(module), wanted)


class Hooked(nn.Module):
    """As code is written that also runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 3 * gradient)
        found: Tensor = self.second(hidden)
        return found


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
def test_code_that_asks_whether_a_tensor_needs_a_gradient_is_told_what_one_record_would_be() -> None:
    """A stack said no, so that the hook was left out and the gradient was another."""
    module, x, y = Hooked().double(), torch.randn(5, 4).double(), torch.randn(5, 2).double()
    sums = []
    for add in (clipped_sum, reference_clipped_sum):
        sums.append(torch.zeros(23, dtype=torch.float64))
        add(module, lambda output, target: (output - target).square().sum(1), x, y, clip=1e9, out=sums[-1])
    torch.testing.assert_close(sums[0], sums[1])


class AsksForGradients(nn.Module):
    """As transformers' `enable_input_require_grads` does behind a frozen table; or a gradient inside of the forward."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last, self.inside = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3), inside
        if not inside:
            self.table.register_forward_hook(lambda module, given, output: output.requires_grad_(True))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        if self.inside:
            with torch.enable_grad():
                hidden = hidden.detach().requires_grad_(True)
                hidden = torch.autograd.grad(hidden.sin().sum(), hidden)[0]
        out: Tensor = self.last(hidden)
        return out


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
def test_an_output_that_is_asked_for_gradients_is_the_same_output(inside: bool) -> None:
    module = AsksForGradients(inside)
    x, y = torch.randn(7, 4), torch.arange(7) % 3

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, reduction="none")

    size = sum(value.numel() for value in module.parameters() if value.requires_grad)
    found, wanted = torch.zeros(size), torch.zeros(size)
    clipped_sum(module, loss, x, y, clip=0.3, out=found)
    reference_clipped_sum(module, loss, x, y, clip=0.3, out=wanted)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    _, examined = structure.examine(module, anatomy_of(module), loss, x, y)
    assert examined.way == ("one by one" if inside else "isolated")


def test_a_network_that_keeps_the_handle_of_its_hook_runs_on_all_records_at_once() -> None:
    """The class of handles counts all hooks there were, ours too: that was taken for something which a record wrote."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
            self.handle = self.first.register_forward_hook(lambda module, given, output: output.tanh())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x))
            return out

    module, x, y = Keeps(), torch.randn(7, 4), torch.arange(7) % 3
    _, examined = structure.examine(
        module, anatomy_of(module), lambda output, y: F.cross_entropy(output, y, reduction="none"), x, y
    )
    assert examined.way == "isolated"
