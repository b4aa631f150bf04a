"""The one place where the native library is opened.

It is opened if it was compiled from the sources that lie beside it, if the processor has the instructions it needs,
and if it gives the known answers. A library of other sources is built again, or left alone where that fails. Where it
is not used although it is there, one line says why; torch does the same work.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from typing import Any

from confide._native import build, known_answers

_ADDRESS, _COUNT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_NORMALS = [_ADDRESS, _ADDRESS, _COUNT, _REAL, _REAL, _ADDRESS, _COUNT]
_ADD = [_ADDRESS, _ADDRESS, _COUNT, _REAL, _REAL]
_CLIP = [_COUNT, _COUNT, _ADDRESS, _ADDRESS, _REAL, _REAL, _REAL]
_GRAM = [_COUNT] * 4 + [_ADDRESS] * 4 + [_REAL] * 2
_SQUARES = [_COUNT] * 3 + [_ADDRESS] * 2

# Everything in `kernels.h`: what each function takes and gives back.
FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "confide_supported": ([], ctypes.c_int),
    "confide_box_muller": ([_ADDRESS, _ADDRESS, _COUNT, _COUNT, ctypes.c_float], ctypes.c_int32),
    "confide_rounded_normals": (_NORMALS, _COUNT),
    "confide_add_float": (_ADD, None),
    "confide_add_double": (_ADD, None),
    "confide_clip_float": (_CLIP, ctypes.c_int),
    "confide_clip_double": (_CLIP, ctypes.c_int),
    "confide_gram_float": (_GRAM, None),
    "confide_gram_double": (_GRAM, None),
    "confide_squares_float": (_SQUARES, None),
    "confide_squares_double": (_SQUARES, None),
    "confide_mean_field": ([_ADDRESS] * 5 + [_COUNT], None),
    "confide_add_rows": ([_ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _COUNT], None),
    "confide_outer_room": ([_ADDRESS], _COUNT),
    "confide_outer": ([_ADDRESS], None),
    "confide_patches_room": ([_ADDRESS], _COUNT),
    "confide_patches": ([_ADDRESS], None),
    "confide_predict": ([_ADDRESS], None),
    "confide_digest": ([_ADDRESS, _COUNT, _COUNT, _ADDRESS], ctypes.c_uint64),
    "confide_lstm": ([_COUNT] * 4 + [_ADDRESS] * 6, None),
    "confide_lstm_back": ([_COUNT] * 4 + [_ADDRESS] * 8, None),
}


@cache
def library() -> Any:
    """The library with the types of its functions set, or None where it must not or cannot be called."""
    if not build.LIBRARY.exists():
        return None
    reason = "" if build.fingerprint_in(build.LIBRARY) == build.fingerprint() else _built_again()
    opened: Any = None
    if not reason:
        opened, reason = _opened()
    if reason:
        warnings.warn(f"native library not used, torch does the work: {reason}", RuntimeWarning, stacklevel=2)
        return None
    return opened


def _built_again() -> str:
    try:
        reason = build.build()
    except OSError as failure:  # a folder that is not ours to write to
        reason = str(failure)
    return reason and f"it was compiled from other sources, and building it again failed ({reason})"


def _opened() -> tuple[Any, str]:
    """The library, or the reason why not; no reason is given for a processor that cannot run it."""
    try:
        opened = ctypes.CDLL(str(build.LIBRARY))
        for name, (takes, gives) in FUNCTIONS.items():
            function = getattr(opened, name)
            function.argtypes, function.restype = takes, gives
    except (OSError, AttributeError) as failure:
        return None, str(failure)
    if opened.confide_supported() != 1:
        return None, ""
    wrong = known_answers.wrong_in(opened)
    return opened, wrong and f"wrong answers to known questions ({wrong})"
