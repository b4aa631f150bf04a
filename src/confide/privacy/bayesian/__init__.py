"""Bayesian differential privacy: what a run costs records drawn like these, told with what it assumes.

Three rules, from the easiest to believe in to the one that holds (Triastcyn and Faltings 2019, 2020):

    product    the paper's: moments averaged over records step by step and multiplied. False: the same record is in
               every step, so E[prod] >= prod E and the number is too small wherever distances persist
    hoelder    of the authors' later code: E[prod_t] <= prod_t (E[()^T])^(1/T). Valid for distances fixed in advance and
               a valid bound on the mean; with an honest bound it comes out near the DP number
    averaged   delta averaged over hold-out records, from whole distance sequences, with a bound that holds for every
               distribution: the one to use

None is a DP guarantee, so each comes back beside the DP number of the same run, and stays on the trusted side until it
is released on the user's word or paid for with noise.

    from confide.privacy import bayesian
    from confide.sources.hold_out import HoldOut, Watch

    watch = Watch()
    data = confide.PrivateData(x, y, schema=schema, watch=watch)
    source = HoldOut(data, x_fresh, y_fresh)
    run = confide.fit(method, module, source, plan)
    bayesian.averaged(source.sequences(), delta=1e-5).release(acknowledge="hold-out records are public")
    bayesian.product(watch.distances(), delta=1e-5)                  # for comparison with the paper

What stays open, for every rule: the run is adaptive. Distances are those of the iterates that came out, while the
theorems want them fixed in advance or bounded over all iterates. A filter that drops a record once its own budget is
used up (Feldman and Zrnic 2021) would close that gap; a statement after the fact does not.
"""

from __future__ import annotations

from confide.privacy.bayesian.average import averaged, chernoff_mean_bound, discrete_laplace
from confide.privacy.bayesian.moments import (
    WHOLE_ORDERS,
    Distances,
    binary_mean_bound,
    exact_binary_mean_bound,
    log_moment,
    log_sampled_moment,
    renyi_gaussians,
    smallest_honest_moment,
)
from confide.privacy.bayesian.result import Attack, BayesianEstimate, Confidential, Trusted
from confide.privacy.bayesian.rules import group_privacy, hoelder, product
from confide.privacy.bayesian.sequences import (
    Sequences,
    constant_sequences,
    covering_counts,
    level_kinds,
    level_of,
    profiles,
    sequences_of,
)
from confide.privacy.bayesian.variational import FreeRun, free_variational_inference

__all__ = [
    "WHOLE_ORDERS",
    "Attack",
    "BayesianEstimate",
    "Confidential",
    "Distances",
    "FreeRun",
    "Sequences",
    "Trusted",
    "averaged",
    "binary_mean_bound",
    "chernoff_mean_bound",
    "constant_sequences",
    "covering_counts",
    "discrete_laplace",
    "exact_binary_mean_bound",
    "free_variational_inference",
    "group_privacy",
    "hoelder",
    "level_kinds",
    "level_of",
    "log_moment",
    "log_sampled_moment",
    "product",
    "profiles",
    "renyi_gaussians",
    "sequences_of",
    "smallest_honest_moment",
]
