"""`from confide.callbacks import ...`: the very module `confide.running.callbacks`."""

import sys

from confide.running import callbacks
from confide.running.callbacks import *  # noqa: F403, for tools that read types

sys.modules[__name__] = callbacks
