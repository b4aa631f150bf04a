"""What both estimators say of their parameters and of what a fit leaves behind, said once."""

from __future__ import annotations

import inspect
from typing import TypeVar

Kind = TypeVar("Kind")

SHARED_PARAMETERS = """\
method : str or Method, default="auto"
    The name of a method (see `confide.methods.names()`) or a method with its settings. "auto" is
    the public rule (`confide.rules.default_method`): models of columns for tables, SGLD for other networks and
    for many classes of many columns.
epsilon : float, default=1.0
    The budget of one fit: everything that it releases, together.
delta : float, default=1e-5
    Probability with which the budget may fail; must be below 1 / records.
bounds : (low, high), sequence of pairs, or mapping of column name to pair, default=None
    Public range of the features. Values outside are clamped, and the range is scaled to [-1, 1].
records : int, default=None
    Public nominal number of records; need not be exact. None: the records are counted privately, for a tenth of
    epsilon at most; batches then are a twentieth of the data, so that their size rests on no count. Declare it for
    fewer than a thousand records.
schema : Schema, default=None
    All of these facts at once, and categories by column name.
assume_public : bool, default=False
    Read the facts that are left open off the data; the privacy statement then says so.
module : torch.nn.Module, default=None
    A network of one's own; records with more than one dimension reach it as (n, channels, height, width). X may be a
    tuple or a dictionary of arrays, or ids, with schema=Schema(inputs=...): they reach it as they are.
hidden : tuple of int, default=None
    Widths of the hidden layers of confide's own network, () for a linear model. None is the public rule, whatever
    the method: one layer of 64 where records * epsilon >= 10 * its weights, epsilon counted as 1 at most in
    regression, and no hidden layer otherwise.
likelihood : Likelihood or str, default=None
    From `confide.likelihoods`, or the name of one: "poisson" and "negative-binomial" for counts, "laplace" and
    "student-t" for numbers with outliers (whose scale is `noise_scale`), "ordinal" for labels whose sorted order means
    something. None is categorical for labels and Gaussian for numbers.
prior : Prior, default=None
    From `confide.priors`, for a method given by name; None is the method's own.
batch : int, default=None
    Expected records per step; None is the public rule, a 32nd of the records but at least 128.
epochs : float, default=None
    Passes over the data; None is the public rule, 40.
steps : int, default=None
    Number of steps, instead of `epochs`.
clip : float, default=None
    Largest norm of one record's answer; None is the public rule, 2.
sampling : {"poisson", "fixed-size", "shuffle", "full-batch"}, default="poisson"
    How a batch is drawn.
adjacency : {"add-remove", "replace-one"}, default="add-remove"
    What one person changes: their record is there or not, or it has other values.
secure : bool, default=False
    Noise on a lattice, against attacks on the low-order bits of floating-point numbers; same epsilon.
device : str or torch.device, default=None
    Where the network is, such as "cuda"; None: where `module` is, or else on the host.
chains : int, default=1
    Independent chains of a sampler, all of them together within the budget.
checkpoint : path or Checkpoints, default=None
    A directory in which the run is kept while it lasts: the same fit goes on from it after it was killed.
ledger : Ledger or path, default=None
    Where fits are charged; None keeps no account over fits.
name : str, default=""
    The data set's name in the ledger.
seed : int, default=None
    For tests only: noise that can be reproduced protects nothing, and the statement claims nothing.
verbose : bool, default=False
    Show on one line how many steps are done; nothing else of a fit that is not over is to be seen.
callbacks : sequence of functions, default=()
    Called now and then with the public state of the run: `confide.callbacks.LiveCurves()` draws curves on a terminal or
    in a notebook, `JsonLines(path)` and `TensorBoard(directory)` write them, `EarlyStopping()` ends the run. What they
    measure is on records that `fit(..., validation=(X, y))` declares to be public.
largest_weight : float, default=1.0
    Public bound of `sample_weight`: a record of this weight counts as one, any other as its share of it. Weights
    outside of [0, largest_weight] are moved to the nearer end.
"""
FITTED_ATTRIBUTES = """\
posterior_ : Posterior
    What was learnt.
privacy_ : Privacy
    What it cost; `privacy_.statement()` says it in one paragraph.
run_ : Run
    The whole run; `save(directory)` writes it.
schema_ : Schema
    The public facts, and whose word each of them is.
n_features_in_ : int
    Number of features seen during `fit`.
feature_names_in_ : ndarray
    Names of the columns seen during `fit`, where the records came as a data frame.
"""
"""What both estimators document; `_documented` puts it before what a class says of its own."""


def documented(kind: type[Kind]) -> type[Kind]:
    """The class with the shared parameters and attributes in its documentation, before its own ones."""
    if kind.__doc__:  # Python leaves documentation out with -OO
        for title, shared in (("Parameters", SHARED_PARAMETERS), ("Attributes", FITTED_ATTRIBUTES)):
            heading = f"{title}\n{'-' * len(title)}\n"
            kind.__doc__ = inspect.cleandoc(kind.__doc__).replace(heading, heading + shared)
    return kind
