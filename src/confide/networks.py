"""`from confide.networks import ...`: the very module `confide.models.networks`."""

import sys

from confide.models import networks
from confide.models.networks import *  # noqa: F403, for tools that read types

sys.modules[__name__] = networks
