"""`from confide.likelihoods import ...`: the very module `confide.models.likelihoods`."""

import sys

from confide.models import likelihoods
from confide.models.likelihoods import *  # noqa: F403, for tools that read types

sys.modules[__name__] = likelihoods
