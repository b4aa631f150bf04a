"""Known questions for the native library: what its kernels must answer, worked out here in plain Python.

Asked whenever the library is opened, in some milliseconds. A compiler's mistake, a damaged file or a wrong constant in
a polynomial would otherwise pass unseen into every step: noise that is a little too small looks like noise.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

Numbers: TypeAlias = Sequence[float]

FLOAT, DOUBLE = 4e-6, 1e-13  # relative errors that the kernels of either type stay well within
_PAIRS = 96  # Enough for whole vectors of every width, and for what is left over behind them.
# So wide that rounding decides little, and a margin in which the kernel may leave a number to exact arithmetic.
_SIGMA, _MARGIN = 2.0**30, 2.0**-16


def wrong_in(library: Any) -> str:
    """The names of the kernels that answered wrong, or ""."""
    checks: dict[str, Callable[[Any], bool]] = {
        "box_muller": _box_muller,
        "rounded_normals": _rounded_normals,
        "add": _add,
        "clip": _clip,
        "squares": _squares,
        "gram": _gram,
        "mean_field": _mean_field,
        "add_rows": _add_rows,
        "outer": _outer,
        "patches": _patches,
        "predict": _predict,
        "lstm": _lstm,
        "digest": _digest,
    }
    return ", ".join(name for name, right in checks.items() if not right(library))


def _words(count: int, bits: int) -> list[int]:
    """Fixed words that look random (a multiplicative congruence)."""
    found, state = [], 88172645463325252
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        found.append(state >> (64 - bits))
    return found


def _radius_words(bits: int) -> list[int]:
    """Random ones, and such as have U near 0, near 1 and near the border at sqrt(1/2)."""
    top = 1 << (bits - 1)
    powers = [1 << power for power in range(bits - 16, bits - 1, 2)]
    edge = powers + [top - power for power in powers]
    edge += [int(top * math.sqrt(0.5)) + step for step in (-(top >> 8), top >> 8)]
    return (edge + _words(_PAIRS, bits))[:_PAIRS]


def _numbers(count: int, seed: int = 0) -> list[float]:
    """Between -1 and 1, on a grid that single precision has."""
    return [word * 2.0**-19 - 1 for word in _words(count + seed, 20)[seed:]]


def _close(found: Numbers, wanted: Numbers, error: float) -> bool:
    return len(found) == len(wanted) and all(
        abs(one - other) <= error * (1 + abs(other)) for one, other in zip(found, wanted, strict=True)
    )


def _normals(radii: Sequence[int], angles: Sequence[int], bits: int) -> list[float]:
    """Box and Muller's transform, cosines before sines."""
    lengths = []
    for word in radii:
        odd = (word % 2 ** (bits - 1)) | 1
        rest = 2 ** (bits - 1) - odd
        lengths.append(math.sqrt(2 * math.log1p(rest / odd)))
    turns = [2 * math.pi * (word / 2**bits) for word in angles]
    return [wave(turn) * length for wave in (math.cos, math.sin) for length, turn in zip(lengths, turns, strict=True)]


def _box_muller(library: Any) -> bool:
    radii, angles = _radius_words(32), _words(_PAIRS, 32)
    words = (ctypes.c_uint32 * (2 * _PAIRS))(*radii, *angles)
    out = (ctypes.c_float * (2 * _PAIRS))()
    least = library.confide_box_muller(ctypes.addressof(words), ctypes.addressof(out), 1, _PAIRS, 2.0)
    wanted = [2 * value for value in _normals(radii, angles, 32)]
    return _close(list(out), wanted, FLOAT) and least == min((word % 2**31) | 1 for word in radii)


def _rounded_normals(library: Any) -> bool:
    radii, angles = _radius_words(64), _words(_PAIRS, 64)
    words = (ctypes.c_uint64 * (2 * _PAIRS))(*radii, *angles)
    out = (ctypes.c_double * (2 * _PAIRS))()
    doubtful = (ctypes.c_int64 * (2 * _PAIRS))()
    places = ctypes.addressof(words), ctypes.addressof(out)
    doubts = library.confide_rounded_normals(*places, _PAIRS, _SIGMA, _MARGIN, ctypes.addressof(doubtful), 2 * _PAIRS)
    if not 0 <= doubts <= 8:  # hardly anything is
        return False
    unsure = set(doubtful[:doubts])
    wanted = [_SIGMA * value for value in _normals(radii, angles, 64)]
    # half a step for the rounding, and what two transforms in double precision may differ by
    return all(place in unsure or abs(out[place] - value) <= 0.5 + 2 * _MARGIN for place, value in enumerate(wanted))


def _add(library: Any) -> bool:
    noise = [round(100 * value) for value in _numbers(9)]
    sums = [8 * value for value in _numbers(9, 9)]
    given = (ctypes.c_double * 9)(*noise)
    wanted = [(max(-20, min(20, round(value * 4))) + one) / 4 for value, one in zip(sums, noise, strict=True)]
    for kind, function in ((ctypes.c_float, library.confide_add_float), (ctypes.c_double, library.confide_add_double)):
        total = (kind * 9)(*sums)
        function(ctypes.addressof(given), ctypes.addressof(total), 9, 0.25, 20.0)
        if list(total) != wanted:
            return False
    return True


class ClipLayer(ctypes.Structure):
    """As in `kernels.h`: output gradients (records, outputs), inputs (records, inputs), and where the sums go."""

    _fields_ = (
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


def _typed(library: Any, name: str) -> Iterator[tuple[Any, Any, float]]:
    yield ctypes.c_float, getattr(library, f"confide_{name}_float"), FLOAT
    yield ctypes.c_double, getattr(library, f"confide_{name}_double"), DOUBLE


def _clip(library: Any) -> bool:
    """One layer of 3 outputs and 35 inputs, 4 records, the first two of them above the bound."""
    records, outputs, inputs, bound, tiny = 4, 3, 35, 2.0, 1e-37
    scale = (4.0, 2.0, 2.0**-6, 2.0**-7)
    left = [scale[k // outputs] * value for k, value in enumerate(_numbers(records * outputs))]
    right = _numbers(records * inputs, 50)
    wanted, norms = [0.0] * (outputs * (inputs + 1)), []
    for record in range(records):
        a, g = right[record * inputs :][:inputs], left[record * outputs :][:outputs]
        norms.append(math.hypot(*g) * math.hypot(1.0, *a))
        factor = min(1.0, bound / norms[-1])
        for o in range(outputs):
            for i, value in enumerate((*a, 1.0)):
                wanted[o * inputs + i if i < inputs else outputs * inputs + o] += factor * g[o] * value
    if not norms[1] > bound > norms[2]:
        return False
    for kind, function, error in _typed(library, "clip"):
        lefts, rights = (kind * len(left))(*left), (kind * len(right))(*right)
        sums, found = (kind * len(wanted))(), (kind * records)()
        weight = ctypes.addressof(sums)
        bias = weight + outputs * inputs * ctypes.sizeof(kind)
        layer = ClipLayer(outputs, inputs, ctypes.addressof(lefts), ctypes.addressof(rights), weight, bias)
        done = function(records, 1, ctypes.addressof(layer), ctypes.addressof(found), bound, 0.0, tiny)
        if not (done and _close(list(found), norms, error) and _close(list(sums), wanted, error)):
            return False
    return True


def _squares(library: Any) -> bool:
    rows, entries, stride = 2, 301, 305
    values = _numbers(rows * stride)
    wanted = [math.fsum(value * value for value in values[row * stride :][:entries]) for row in range(rows)]
    for kind, function, error in _typed(library, "squares"):
        given, found = (kind * len(values))(*values), (kind * rows)()
        function(rows, entries, stride, ctypes.addressof(given), ctypes.addressof(found))
        if not _close(list(found), wanted, error):
            return False
    return True


def _gram(library: Any) -> bool:
    """One record of 17 positions, 5 outputs and 11 inputs: every kind of tile occurs."""
    positions, outputs, inputs = 17, 5, 11
    left, right = _numbers(positions * outputs), _numbers(positions * inputs, 99)
    rows = range(positions)
    wanted = [
        math.fsum(left[t * outputs + o] * right[t * inputs + i] for t in rows) ** 2
        for o in range(outputs)
        for i in range(inputs)
    ]
    for kind, function, error in _typed(library, "gram"):
        lefts, rights = (kind * len(left))(*left), (kind * len(right))(*right)
        found, spread = (kind * 1)(), (kind * 1)()
        places = map(ctypes.addressof, (lefts, rights, found, spread))
        function(1, positions, outputs, inputs, *places, 0.0, 0.0)
        answers = [math.fsum(wanted), math.hypot(*left) * math.hypot(*right)]
        if not _close([*found, *spread], answers, error):
            return False
    return True


def _mean_field(library: Any) -> bool:
    count = 25
    mean, rho, noise = _numbers(count), [20 * value for value in _numbers(count, 30)], _numbers(count, 60)
    made = [(ctypes.c_float * count)(*values) for values in (mean, rho, noise)]
    weight, slope = (ctypes.c_float * count)(), (ctypes.c_float * count)()
    library.confide_mean_field(*map(ctypes.addressof, (*made, weight, slope)), count)
    wanted = [m + (max(r, 0.0) + math.log1p(math.exp(-abs(r)))) * n for m, r, n in zip(mean, rho, noise, strict=True)]
    slopes = [n / (1 + math.exp(-r)) for r, n in zip(rho, noise, strict=True)]
    return _close(list(weight), wanted, FLOAT) and _close(list(slope), slopes, FLOAT)


def _add_rows(library: Any) -> bool:
    """Sums that single precision would lose: a large number comes and goes again."""
    count = 1100  # two whole blocks, and what is left over
    small, noise = _numbers(count), _numbers(count, 77)
    rows = [[2.0**30] * count, small, [-(2.0**30)] * count]
    made = [(ctypes.c_float * count)(*row) for row in (*rows, noise)]
    places = (ctypes.c_void_p * len(rows))(*map(ctypes.addressof, made[:-1]))
    found = (ctypes.c_float * count)()
    library.confide_add_rows(ctypes.addressof(places), len(rows), *map(ctypes.addressof, (made[-1], found)), count)
    return _close(list(found), [a + b for a, b in zip(small, noise, strict=True)], FLOAT)


class OuterTask(ctypes.Structure):
    """As in `kernels.h`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("records", "outputs", "inputs", "block")),
        *((name, ctypes.c_void_p) for name in ("left", "right", "factors")),
        *((name, ctypes.c_int64) for name in ("left_stride", "right_stride", "weight_stride")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "room")),
    )


def _outer(library: Any) -> bool:
    """11 records in blocks of 4, 13 outputs, 35 inputs: whole tiles of every width, and what is left over."""
    records, outputs, inputs = 11, 13, 35
    left, right = _numbers(records * outputs), _numbers(records * inputs, 40)
    factors, before = _numbers(records, 80), _numbers(outputs * (inputs + 1), 90)
    wanted = list(before)
    for record, factor in enumerate(factors):
        for o in range(outputs):
            scaled = factor * left[record * outputs + o]
            wanted[outputs * inputs + o] += scaled
            for i in range(inputs):
                wanted[o * inputs + i] += scaled * right[record * inputs + i]
    made = [(ctypes.c_float * len(values))(*values) for values in (left, right, factors)]
    found = (ctypes.c_float * len(before))(*before)
    weight = ctypes.addressof(found)
    shape, strides = (records, outputs, inputs, 4), (outputs, inputs, inputs)
    bias = weight + 4 * outputs * inputs
    task = OuterTask(*shape, *map(ctypes.addressof, made), *strides, weight, bias, None)
    room = (ctypes.c_float * library.confide_outer_room(ctypes.addressof(task)))()
    task.room = ctypes.addressof(room)
    library.confide_outer(ctypes.addressof(task))
    return _close(list(found), wanted, FLOAT)


class PatchTask(ctypes.Structure):
    """As in `kernels.h`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("records", "groups", "outputs", "channels")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "height", "width")),
        *((name, ctypes.c_int64 * 2) for name in ("kernel", "stride", "dilation", "padding")),
        ("left", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("left_record", "left_channel", "left_position")),
        ("images", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("image_record", "image_channel", "image_row", "image_column")),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("norms", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
    )


def _patches(library: Any) -> bool:
    """Two records of one group with channels last, padded unevenly, steps of (1, 2): an edge on either side."""
    outputs, channels, height, width, rows, columns = 9, 4, 5, 4, 5, 2
    kernel, stride, padding = (3, 3), (1, 2), (1, 1)
    positions, across = rows * columns, channels * kernel[0] * kernel[1]
    left, images = _numbers(2 * positions * outputs), _numbers(2 * height * width * channels, 30)
    wanted: list[float] = []
    for record in range(2):
        for o in range(outputs):
            for entry in range(across):
                c, y, x = entry // 9, entry // 3 % 3 - padding[0], entry % 3 - padding[1]
                total = 0.0
                for t in range(positions):
                    row, column = t // columns * stride[0] + y, t % columns * stride[1] + x
                    if 0 <= row < height and 0 <= column < width:
                        pixel = images[((record * height + row) * width + column) * channels + c]
                        total += left[(record * positions + t) * outputs + o] * pixel
                wanted.append(total)
    made = [(ctypes.c_float * len(values))(*values) for values in (left, images)]
    found, norms = (ctypes.c_float * len(wanted))(), (ctypes.c_float * 2)()
    task = PatchTask(2, 1, outputs, channels, rows, columns, height, width)
    pairs = ((ctypes.c_int64 * 2)(*pair) for pair in (kernel, stride, (1, 1), padding))
    task.kernel, task.stride, task.dilation, task.padding = pairs
    task.left, task.images, task.out, task.norms = map(ctypes.addressof, (*made, found, norms))
    task.left_record, task.left_channel, task.left_position = positions * outputs, 1, outputs
    task.image_record, task.image_channel = height * width * channels, 1
    task.image_row, task.image_column, task.out_stride = width * channels, channels, outputs * across
    room = (ctypes.c_float * library.confide_patches_room(ctypes.addressof(task)))()
    task.room = ctypes.addressof(room)
    library.confide_patches(ctypes.addressof(task))
    half = outputs * across
    squares = [sum(value * value for value in wanted[start : start + half]) for start in (0, half)]
    return _close(list(found), wanted, FLOAT) and _close(list(norms), squares, FLOAT)


class PredictionLayer(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("outputs", "inputs", "weight", "bias", "activation"))


class PredictionTask(ctypes.Structure):
    """As in `kernels.h`."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("layer_count", ctypes.c_int64),
        ("draws", ctypes.c_void_p),
        ("draw_count", ctypes.c_int64),
        ("parameters", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("records", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("first", ctypes.c_int64),
    )


def _predict(library: Any) -> bool:
    """A network 3-7-3 with every activation in turn, one draw, 5 records: probabilities of three classes."""
    features, hidden, classes, records, kind_of_classes = 3, 7, 3, 5, 1
    parameters = hidden * (features + 1) + classes * (hidden + 1)
    draw, x = _numbers(parameters), [3 * value for value in _numbers(records * features, 7)]
    functions: list[Callable[[float], float]] = [
        lambda value: value,
        lambda value: max(value, 0.0),
        math.tanh,
        lambda value: 1 / (1 + math.exp(-value)),
        lambda value: value / (1 + math.exp(-value)),
    ]
    for activation, function in enumerate(functions):
        second = hidden * (features + 1)
        layers = (PredictionLayer * 2)(
            PredictionLayer(hidden, features, 0, hidden * features, activation),
            PredictionLayer(classes, hidden, second, second + classes * hidden, 0),
        )
        given, inputs = (ctypes.c_float * parameters)(*draw), (ctypes.c_float * len(x))(*x)
        out = (ctypes.c_float * (records * classes))()
        at_layers, at_draws = ctypes.addressof(layers), ctypes.addressof(given)
        at_x, at_out = ctypes.addressof(inputs), ctypes.addressof(out)
        shape = (records, records, kind_of_classes)
        task = PredictionTask(at_layers, 2, at_draws, 1, parameters, at_x, *shape, at_out, None, None, 0)
        library.confide_predict(ctypes.addressof(task))
        wanted: list[float] = []
        for record in range(records):
            values = _linear(draw, x[record * features :][:features], hidden)
            logits = _linear(draw[second:], [function(value) for value in values], classes)
            whole = math.fsum(map(math.exp, logits))
            wanted += [math.exp(value) / whole for value in logits]
        if not _close(list(out), wanted, FLOAT):
            return False
    return True


def _digest(library: Any) -> bool:
    """Two blocks and a part of one, of numbers that are told apart by their bits and of such as are not."""
    words, key = _words(600, 32), _words(264, 32)
    given, secret = (ctypes.c_uint32 * len(words))(*words), (ctypes.c_uint32 * 266)(*key, 7, 9)
    size, prime, point = 4 * len(words) - 2, 2**61 - 1, 9 * 2**32 + 7
    content = bytes(given)[:size]
    code = size + 1
    for start in range(0, size, 1024):
        block = content[start:][:1024].ljust(1024, b"\0")
        values = [int.from_bytes(block[at : at + 4], "little") for at in range(0, 1024, 4)]
        for keys in (key, key[8:]):
            sums = [(value + secret_word) % 2**32 for value, secret_word in zip(values, keys, strict=False)]
            total = sum(one * other for one, other in zip(sums[::2], sums[1::2], strict=True)) % 2**64
            code = (code * point + total % 2**32) * point + (total >> 32)
    if library.confide_digest(ctypes.addressof(given), size, 0, ctypes.addressof(secret)) != code % prime:
        return False
    for real, kind in ((4, ctypes.c_float), (8, ctypes.c_double)):
        alike = [(kind * 70)(*[zero, none, 1.0] * 22) for zero, none in ((0.0, math.nan), (-0.0, -math.nan))]
        first, second = (library.confide_digest(one, 70 * real, real, ctypes.addressof(secret)) for one in alike)
        if first != second:
            return False
    return True


PANEL = 16  # columns of a weight that a kernel of `recurrence.cpp` makes side by side


def _lstm(library: Any) -> bool:
    """Seven records, three steps, five units, whose weight fills a panel and a part of one.

    Forwards the definition; backwards the slope of the loss along one direction, by differences of the definition.
    """
    records, steps, size = 7, 3, 5
    maps = [2 * value for value in _numbers(records * steps * 4 * size)]
    weight, bias, of_outputs = _numbers(4 * size * size, 7), _numbers(4 * size, 8), _numbers(records * steps * size, 9)
    columns = [weight[row * size :][:size] for row in range(4 * size)]
    gates, out = (ctypes.c_float * len(maps))(*maps), (ctypes.c_float * len(maps))()
    cells, bent, outputs = ((ctypes.c_float * (records * steps * size))() for _ in range(3))
    given, biases = (ctypes.c_float * len(of_outputs))(*of_outputs), (ctypes.c_float * (4 * size))(*bias)
    state, cell = ((ctypes.c_float * (records * size))() for _ in range(2))
    shape, packed, turned = (records, steps, size, 0), _in_panels(columns), _in_panels([*zip(*columns, strict=True)])
    library.confide_lstm(*shape, *map(ctypes.addressof, (packed, biases, gates, cells, bent, outputs)))
    wanted = _states(maps, columns, bias, steps)
    if not _close(list(outputs), wanted, FLOAT):
        return False
    library.confide_lstm_back(*shape, *map(ctypes.addressof, (turned, gates, cells, bent, given, state, cell, out)))
    step, way = 2.0**-16, _numbers(len(maps), 10)
    ends = [_states([m + s * w for m, w in zip(maps, way, strict=True)], columns, bias, steps) for s in (step, -step)]
    slopes = [(one - other) / (2 * step) for one, other in zip(*ends, strict=True)]
    for record in range(records):
        some, all_gates = steps * size, 4 * steps * size
        rise = sum(map(float.__mul__, of_outputs[record * some :][:some], slopes[record * some :][:some]))
        found = math.fsum(
            map(float.__mul__, way[record * all_gates :][:all_gates], out[record * all_gates :][:all_gates])
        )
        if not _close([found], [rise], 4 * FLOAT):
            return False
    return True


def _in_panels(columns: Sequence[Numbers]) -> Any:
    depth = len(columns[0])
    filled = [*columns, *[[0.0] * depth] * (-len(columns) % PANEL)]
    panels = [filled[start : start + PANEL] for start in range(0, len(filled), PANEL)]
    return (ctypes.c_float * (len(filled) * depth))(
        *(one[k] for panel in panels for k in range(depth) for one in panel)
    )


def _states(maps: Numbers, weight: Sequence[Numbers], bias: Numbers, steps: int) -> list[float]:
    """Of every step of every record, by the definition of an LSTM."""
    size, found = len(weight[0]), list[float]()

    def sigmoid(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    for start in range(0, len(maps), 4 * steps * size):
        state, cell = [0.0] * size, [0.0] * size
        for step in range(steps):
            here = maps[start + 4 * step * size :][: 4 * size]
            sums = [
                m + b + math.fsum(map(float.__mul__, row, state)) for m, b, row in zip(here, bias, weight, strict=True)
            ]
            enter, forget, leave = ([sigmoid(v) for v in sums[k * size :][:size]] for k in (0, 1, 3))
            candidate = [math.tanh(v) for v in sums[2 * size :][:size]]
            cell = [f * c + e * g for f, c, e, g in zip(forget, cell, enter, candidate, strict=True)]
            state = [o * math.tanh(c) for o, c in zip(leave, cell, strict=True)]
            found += state
    return found


def _linear(weights: Numbers, inputs: Numbers, outputs: int) -> list[float]:
    width = len(inputs)
    rows = (weights[row * width :][:width] for row in range(outputs))
    products = [math.fsum(w * value for w, value in zip(row, inputs, strict=True)) for row in rows]
    return [value + weights[outputs * width + row] for row, value in enumerate(products)]
