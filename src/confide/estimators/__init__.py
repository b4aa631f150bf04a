"""Private Bayesian learning in the scikit-learn manner.

    model = PrivateBayesClassifier(epsilon=1.0, delta=1e-5, bounds=(0, 16), classes=range(10))
    model.fit(X, y)
    model.predict_proba(X_test)            # posterior predictive
    model.predictive(X_test).epistemic     # and .aleatoric, .interval(0.9)
    model.privacy_.statement()

An estimator turns its parameters into a `confide.Request` and shows the outcome; what is checked first, what is public
and what is charged is settled in `confide.workflow`, for every door alike.

What leaks in spite of these classes:

- A step before them in a Pipeline that learns from the data, such as StandardScaler, PCA or OneHotEncoder, reads all
  records in silence, and the estimator cannot see it. Leave it out: the declared bounds scale the features.
- `score` on training or held-out private records is an unprotected reading of them, and so are the results of
  `cross_val_score` and `GridSearchCV`. Use public records, or keep the numbers to yourself.
- Every fit spends. `cross_val_score` with k folds fits k times: each record is in k - 1 of the training sets, and the
  ledger, which does not know the folds, charges all k. Together they cost what k releases of this budget compose to:
  less than k * epsilon, far more than epsilon. A ledger with a limit refuses the fit that would exceed it
  (BudgetExceeded) before a record is read. With several processes give the ledger's path.
"""

from confide.estimators.classifier import PrivateBayesClassifier
from confide.estimators.regressor import PrivateBayesRegressor

__all__ = ["PrivateBayesClassifier", "PrivateBayesRegressor"]
