"""What libraries of models are told while records run together: not to look at their values.

Models of the transformers library skip a mask that masks nothing, which is a branch on a record's values. They do not
while they are traced, for then there are no values to look at; and inside of a region there are none either. With the
mask applied instead of skipped the outputs are the same. Outside of a region nothing is changed.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from confide.mechanism.clipping.isolation import is_inside

_HOME, _NAME = "transformers.utils.import_utils", "is_tracing"


def tell() -> None:
    """Once the library is imported, whoever imported it; called before a module is examined."""
    home = sys.modules.get(_HOME)
    original = vars(home).get(_NAME) if home is not None else None
    if original is None or hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def is_tracing(*arguments: Any, **options: Any) -> bool:
        return is_inside() or bool(original(*arguments, **options))

    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and vars(module).get(_NAME) is original:
            setattr(module, _NAME, is_tracing)
