"""`from confide.priors import ...`: the very module `confide.models.priors`."""

import sys

from confide.models import priors
from confide.models.priors import *  # noqa: F403, for tools that read types

sys.modules[__name__] = priors
