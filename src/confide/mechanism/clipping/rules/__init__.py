"""Layer rules, one per layer family; `rule_for` adds another.

Importing the package registers the rules of every family.
"""

from __future__ import annotations

from confide.mechanism.clipping.rules import attention as attention
from confide.mechanism.clipping.rules import bayesian as bayesian
from confide.mechanism.clipping.rules import convolution as convolution
from confide.mechanism.clipping.rules import embedding as embedding
from confide.mechanism.clipping.rules import experts as experts
from confide.mechanism.clipping.rules import linear as linear
from confide.mechanism.clipping.rules import normalisation as normalisation
from confide.mechanism.clipping.rules import recurrent as recurrent
from confide.mechanism.clipping.rules import transposed as transposed
from confide.mechanism.clipping.rules.registry import Call as Call
from confide.mechanism.clipping.rules.registry import Contribution as Contribution
from confide.mechanism.clipping.rules.registry import rule_for as rule_for
