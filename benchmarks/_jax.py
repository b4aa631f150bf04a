"""The JAX contender: the torch module's weights and layers, restated for one record, then vmap, grad and jit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from torch import nn

from benchmarks._models import Block, Case, Transformer, cross_entropy

Apply = Callable[[Any, Any], Any]


def make_step(case: Case, clip: float, noise_multiplier: float, learning_rate: float) -> Callable[[], None]:
    """One compiled step: gradients of all records, clipping, sum, noise, update."""
    apply = layer(case.module)
    loss = _cross_entropy if case.loss is cross_entropy else _logistic

    def record_loss(weights: Any, x: Any, y: Any) -> Any:
        return loss(apply(weights, x), y)

    def update(weights: Any, key: Any, x: Any, y: Any) -> tuple[Any, Any]:
        gradients = jax.vmap(jax.grad(record_loss), in_axes=(None, 0, 0))(weights, x, y)
        leaves, structure = jax.tree.flatten(gradients)
        squares = sum((leaf.reshape(len(leaf), -1) ** 2).sum(1) for leaf in leaves)
        factors = jnp.minimum(1.0, clip / jnp.sqrt(squares))
        key, *keys = jax.random.split(key, len(leaves) + 1)
        sums = [
            jnp.tensordot(factors, leaf, axes=1) + noise_multiplier * clip * jax.random.normal(k, leaf.shape[1:])
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        change = jax.tree.unflatten(structure, sums)
        scale = learning_rate / case.batch
        return jax.tree.map(lambda weight, total: weight - scale * total, weights, change), key

    compiled = jax.jit(update)
    x, y = jnp.asarray(case.x.numpy()), jnp.asarray(case.y.numpy())
    state = (weights_of(case.module), jax.random.PRNGKey(0))

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(compiled(*state, x, y))

    return step


def weights_of(module: nn.Module) -> dict[str, Any]:
    return {name: jnp.asarray(p.detach().numpy()) for name, p in module.named_parameters()}


def _cross_entropy(output: Any, y: Any) -> Any:
    return -jax.nn.log_softmax(output)[y]


def _logistic(output: Any, y: Any) -> Any:
    return jax.nn.softplus(output[0]) - y * output[0]


def layer(module: nn.Module, prefix: str = "") -> Apply:
    """The module as a function of all weights (by torch's names) and one record without batch axis."""
    match module:
        case nn.Linear():
            return lambda w, x: x @ w[prefix + "weight"].T + w[prefix + "bias"]
        case nn.ReLU():
            return lambda w, x: jax.nn.relu(x)
        case nn.Flatten():
            return lambda w, x: x.reshape(-1)
        case nn.Conv2d():
            return _convolution(module, prefix)
        case nn.MaxPool2d():
            return _max_pool(module.kernel_size, module.stride)
        case nn.LayerNorm():
            return lambda w, x: _layer_norm(x) * w[prefix + "weight"] + w[prefix + "bias"]
        case nn.Sequential():
            return _chain([layer(child, f"{prefix}{name}.") for name, child in module.named_children()])
        case Block():
            return _block(module, prefix)
        case Transformer():
            return _transformer(module)
        case _:
            raise TypeError(f"{type(module).__name__}: not restated for JAX")


def _chain(parts: list[Apply]) -> Apply:
    def apply(weights: Any, x: Any) -> Any:
        for part in parts:
            x = part(weights, x)
        return x

    return apply


def _convolution(module: nn.Conv2d, prefix: str) -> Apply:
    padding = [(int(p), int(p)) for p in module.padding]

    def apply(weights: Any, x: Any) -> Any:
        output = jax.lax.conv_general_dilated(x[None], weights[prefix + "weight"], module.stride, padding)
        return output[0] + weights[prefix + "bias"][:, None, None]

    return apply


def _max_pool(size: Any, stride: Any) -> Apply:
    window, strides = (1, size, size), (1, stride, stride)
    return lambda w, x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "VALID")


def _layer_norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def _block(module: Block, prefix: str) -> Apply:
    parts = {name: layer(child, f"{prefix}{name}.") for name, child in module.named_children() if name != "attention"}
    project = layer(module.attention.project, f"{prefix}attention.project.")
    merge = layer(module.attention.merge, f"{prefix}attention.merge.")
    heads = module.attention.heads

    def attend(weights: Any, x: Any) -> Any:
        length, width = x.shape
        split = project(weights, x).reshape(length, 3, heads, width // heads).transpose(1, 2, 0, 3)
        query, key, value = split
        scores = query @ key.transpose(0, 2, 1) / jnp.sqrt(query.shape[-1])
        mixed = jax.nn.softmax(scores, -1) @ value
        return merge(weights, mixed.transpose(1, 0, 2).reshape(length, width))

    def apply(weights: Any, x: Any) -> Any:
        x = x + attend(weights, parts["first"](weights, x))
        hidden = jax.nn.gelu(parts["widen"](weights, parts["second"](weights, x)), approximate=True)
        return x + parts["narrow"](weights, hidden)

    return apply


def _transformer(module: Transformer) -> Apply:
    positions = jnp.asarray(module.positions.numpy())
    rest = _chain([layer(module.blocks, "blocks."), layer(module.norm, "norm.")])
    read = layer(module.read, "read.")

    def apply(weights: Any, tokens: Any) -> Any:
        hidden = rest(weights, weights["embed.weight"][tokens] + positions)
        return read(weights, hidden.mean(0))

    return apply
