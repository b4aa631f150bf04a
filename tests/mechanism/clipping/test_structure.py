"""What the engine finds out about a module, and that it leaves the module as it was."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor

from confide.errors import UnclippableError
from confide.mechanism.clipping import Call, clipped_sum, engine, rule_for, sealed
from confide.mechanism.clipping.anatomy import anatomy_of
from confide.mechanism.clipping.engine import engine_of
from confide.mechanism.clipping.reference import reference_clipped_sum
from confide.mechanism.clipping.rules import registry
from tests.mechanism.clipping.zoo import ZOO
from tests.mechanism.clipping.zoo_tools import CLASSES, Lambda, classes, floats, plain


def run(module: nn.Module, loss: Callable[..., Tensor], x: Any, y: Any, clip: float = 0.1) -> Tensor:
    size = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    total = torch.zeros(size, dtype=next(module.parameters()).dtype)
    clipped_sum(module, loss, x, y, clip=clip, out=total)
    return total


def centred(self: Any, x: Tensor) -> Tensor:
    return self.head(x - x.mean(0))


class Seen:
    """A list that outlives a sealed pass, by the fixture `seen`; only a test may."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def see(self, values: Tensor) -> None:
        with torch._C.DisableTorchFunction():  # a copy of the stack: what the pass itself makes is emptied after it
            self.tensors.append(stack_of(values.detach()).clone())


SEEN = Seen()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    kept = sealed.Reachable._kept
    monkeypatch.setattr(
        sealed.Reachable,
        "_kept",
        lambda self, value, again: [] if isinstance(value, Seen) else kept(self, value, again),
    )
    SEEN.tensors.clear()
    return SEEN


def stack_of(values: Tensor) -> Tensor:
    """What a tensor kept from a region holds underneath; only a test may look."""
    return get_unwrapped(values) if is_batchedtensor(values) else values


# errors do not depend on records --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
def test_the_examination_does_not_see_records(seen: Seen) -> None:
    """Every tensor the module sees before the first real pass is made up."""

    def forward(self: Any, x: Tensor) -> Tensor:
        SEEN.see(x)
        return self.head(x)

    module, loss, x, y = plain(Lambda(forward, head=nn.Linear(5, CLASSES)), 5)
    x = x + 100
    run(module.double(), loss, x, y)
    *examined, real = SEEN.tensors
    assert len(examined) >= 3
    assert all(made.max() < 50 for made in examined)
    torch.testing.assert_close(real.squeeze(1)[: len(x)], x)  # what fills the batch up comes after


def test_the_examination_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, loss, x, y = ZOO["mlp"].case()
    examined = []
    whole = engine.examine  # type: ignore[attr-defined]

    def counted(*arguments: Any) -> Any:
        examined.append(1)
        return whole(*arguments)

    monkeypatch.setattr(engine, "examine", counted)
    run(module, loss, x, y)
    run(module, loss, x[:3], y[:3])  # another number of records is nothing new
    assert len(examined) == 1
    for _ in range(3):
        run(module, lambda output, target: classes(output, target), x, y)  # the same code is the same loss
    assert len(examined) == 2


def test_an_empty_batch_is_a_normal_step() -> None:
    for name in ("mlp", "mnist_network", "transformer", "lstm", "bare_parameter", "mean_field_4_draws"):
        module, loss, x, y = ZOO[name].case()
        total = torch.ones(sum(parameter.numel() for parameter in module.parameters()), dtype=torch.float64)
        norms = clipped_sum(module, loss, x[:0], y[:0], clip=1.0, out=total)
        assert norms.shape == (0,)
        assert (total == 1).all()


def test_an_empty_first_batch_never_raises() -> None:
    """Even when no made-up batch runs through the module. Real records are then refused, whatever they hold."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if len(x) and not (x > 1000).all():
            raise RuntimeError("only large numbers")
        return self.head(x)

    module, loss, x, y = plain(Lambda(forward, head=nn.Linear(5, CLASSES)), 5)
    assert run(module.double(), loss, x[:0], y[:0]).norm() == 0
    with pytest.raises(RuntimeError, match="only large numbers"):
        run(module, loss, x + 2000, y)


# the module is left as it was -----------------------------------------------------------------------------------


def hooks_of(module: nn.Module) -> int:
    return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in module.modules())


@pytest.mark.parametrize("name", ["mlp", "transformer", "lstm", "bare_parameter", "mean_field_1_draws"])
def test_the_module_is_left_as_it_was(name: str) -> None:
    module, loss, x, y = ZOO[name].case()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    flags = [parameter.requires_grad for parameter in module.parameters()]
    run(module, loss, x, y)
    assert hooks_of(module) == 0
    assert all("forward" not in vars(layer) for layer in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert flags == [parameter.requires_grad for parameter in module.parameters()]
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    copy.deepcopy(module)


def test_parameters_come_back_bit_by_bit(seen: Seen) -> None:
    """Constant, zero, negative zero, tiny and mixed ones are moved in different ways, and each must find back."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, CLASSES)).double()
    with torch.no_grad():
        module[0].weight[::2] *= 1e-9
        module[2].weight.zero_()
        module[2].weight[0, 0] = -0.0
        module[3].weight.fill_(-0.0)
        module[3].bias.fill_(3.0)
    before = [parameter.detach().view(torch.int64).clone() for parameter in module.parameters()]
    module[2].register_forward_hook(lambda layer, inputs, output: SEEN.see(layer.weight))
    _, loss, x, y = plain(nn.Identity(), 5)
    run(module, loss, x[:0], y[:0])
    after = [parameter.detach().view(torch.int64) for parameter in module.parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert min(weight.abs().min().item() for weight in SEEN.tensors) > 0  # while it was examined


def test_a_used_module_can_be_pickled() -> None:
    module, loss, x, y = ZOO["mlp"].case()
    run(module, loss, x, y)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


def test_hooks_are_gone_after_an_error() -> None:
    """Out of the vocabulary: the records count as zero, and nothing stays behind."""
    module, loss, x, y = ZOO["transformer"].case()
    run(module, loss, x, y)
    assert run(module, loss, x + 1000, y).norm() == 0
    assert hooks_of(module) == 0
    assert all("forward" not in vars(layer) for layer in module.modules())


def test_hooks_of_the_user_see_and_change_what_they_always_did() -> None:
    """A hook that scales the output comes after the engine's, so the gradient is still that of the layer."""
    module, loss, x, y = ZOO["mlp"].case()
    module[0].register_forward_hook(lambda layer, inputs, output: 3 * output)
    found, wanted = run(module, loss, x, y), torch.zeros(sum(p.numel() for p in module.parameters()), dtype=x.dtype)
    reference_clipped_sum(module, loss, x, y, clip=0.1, out=wanted)
    torch.testing.assert_close(found, wanted)


def test_random_state_and_buffers_survive_the_examination() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))
            self.head = nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1  # type: ignore[assignment]
            return self.head(F.dropout(x))

    module, loss, x, y = plain(Counting(), 5)
    run(module.double(), loss, x[:0], y[:0])
    assert module.calls.item() == 0
    state = torch.get_rng_state()
    run(Counting().double(), loss, x[:0], y[:0])
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    Counting()  # the initialisation draws, the examination must not
    assert torch.equal(drawn, torch.get_rng_state())


def test_engines_die_with_their_modules() -> None:
    module, loss, x, y = ZOO["logistic_regression"].case()
    run(module, loss, x, y)
    watch = weakref.ref(engine_of(module))
    del module
    gc.collect()
    assert watch() is None


def test_a_module_changed_between_steps_is_planned_anew() -> None:
    module, loss, x, y = ZOO["mlp"].case()
    run(module, loss, x, y)
    module[0].requires_grad_(False)
    module[2] = nn.Linear(9, 3).double()
    found = run(module, loss, x, y)
    wanted = torch.zeros_like(found)
    reference_clipped_sum(module, loss, x, y, clip=0.1, out=wanted)
    torch.testing.assert_close(found, wanted)
    module[2] = nn.Sequential(nn.Linear(9, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(UnclippableError):
        run(module, loss, x, y)


# structure ------------------------------------------------------------------------------------------------------


def test_weights_used_outside_their_layer_are_copied() -> None:
    """Hooks alone miss such a use: without the walk over the graph the sum would be wrong, and the clip with it."""
    module, loss, x, y = ZOO["weight_used_outside_its_layer"].case()
    run(module, loss, x, y)
    plan = engine_of(module).anatomy
    assert plan is not None
    assert {plan.parameters[index].shape for index in plan.escaped} == {module.encoder.weight.shape}


@pytest.mark.parametrize("start", [0.0, 1e-12])
def test_layers_behind_parameters_that_start_at_zero_are_examined(start: float) -> None:
    """No gradient passes a last layer of zeros, so with its own parameters nothing wrong would be seen before it."""
    module, loss, x, y = ZOO["weight_used_outside_its_layer"].case()
    trained = copy.deepcopy(module.head.state_dict())
    nn.init.constant_(module.head.weight, start)
    run(module, loss, x, y)
    assert (module.head.weight == start).all()
    module.head.load_state_dict(trained)
    found = run(module, loss, x, y)
    wanted = torch.zeros_like(found)
    reference_clipped_sum(module, loss, x, y, clip=0.1, out=wanted)
    torch.testing.assert_close(found, wanted)
    mixing, _, x, y = plain(Lambda(centred, head=nn.Linear(5, CLASSES)), 5)
    nn.init.zeros_(mixing.head.weight)
    with pytest.raises(UnclippableError, match="mixed"):
        run(mixing.double(), loss, x, y)


def test_layers_find_their_rules() -> None:
    """An ordinary network must not fall back silently: that would be right but slow."""
    for name in ("mlp", "residual_network", "embeddings", "norms_over_features", "bags", "mean_field_images_1_draws"):
        module, *_ = ZOO[name].case()
        assert all(slot.rule is not None for slot in anatomy_of(module).slots), name
    for name in ("transformer", "lstm"):
        module, *_ = ZOO[name].case()
        assert all(slot.rule or slot.explicit for slot in anatomy_of(module).slots), name


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_rule_of_ones_own_takes_three_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))

    @rule_for(Scale)
    def scale(call: Call) -> dict[str, Tensor]:
        return {"factor": call.input * call.gradient}

    module, loss, x, y = plain(nn.Sequential(Scale(), nn.Linear(5, CLASSES)), 5)
    found = run(module.double(), loss, x, y)
    wanted = torch.zeros_like(found)
    reference_clipped_sum(module, loss, x, y, clip=0.1, out=wanted)
    torch.testing.assert_close(found, wanted)
    assert all(slot.rule is not None for slot in anatomy_of(module).slots)


def test_a_wrong_rule_is_replaced_by_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that forgets a factor of two is found out on made-up records; the sum is right all the same."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))

    @rule_for(Scale)
    def scale(call: Call) -> dict[str, Tensor]:
        return {"factor": call.input * call.gradient / 2}

    module, loss, x, y = plain(nn.Sequential(Scale(), nn.Linear(5, CLASSES)), 5)
    found = run(module.double(), loss, x, y)
    wanted = torch.zeros_like(found)
    reference_clipped_sum(module, loss, x, y, clip=0.1, out=wanted)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ["transformer", "cross_attention", "lstm", "deep_lstm_both_ways", "gru",
                                  "plain_recurrence", "lstm_with_positions_first"])  # fmt: skip
def test_explicit_forwards_are_the_layers_own_functions(name: str) -> None:
    from confide.mechanism.clipping.tape import Tape

    module, _, x, _ = ZOO[name].case()
    inputs = x if isinstance(x, tuple) else (x,)
    wanted = module(*inputs)
    with Tape(anatomy_of(module), 0).explicit_forwards():
        found = module(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
@pytest.mark.parametrize("axis", [0, 1])
def test_a_network_that_takes_another_way_for_real_records(axis: int) -> None:
    """The number of calls differs from that of the examination, and from record to record."""

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.body(x.transpose(0, axis))
        if x.abs().max() > 50:
            hidden = self.body(torch.tanh(hidden))
        return self.head(hidden.transpose(0, axis).mean(1))

    module, loss, x, y = plain(Lambda(forward, body=nn.Linear(5, 5), head=nn.Linear(5, CLASSES)), 6, 5)
    x[:3] += 100
    found = run(module.double(), loss, x, y)
    parts = [torch.zeros_like(found) for _ in range(2)]
    for part, some in zip(parts, (slice(0, 3), slice(3, None)), strict=True):
        reference_clipped_sum(module, loss, x[some], y[some], clip=0.1, out=part)
    torch.testing.assert_close(found, parts[0] + parts[1])


def test_parameters_the_loss_does_not_use() -> None:
    module, loss, x, y = plain(
        Lambda(lambda self, x: self.head(x), head=nn.Linear(5, CLASSES), spare=nn.Linear(2, 2)), 5
    )
    found = run(module.double(), loss, x, y)
    assert found[-6:].norm() == 0
    assert found[:-6].norm() > 0
    constant = Lambda(lambda self, x: x, unused=nn.Linear(5, 5)).double()
    assert run(constant, lambda output, y: output.sum(1), floats(5), y).norm() == 0
