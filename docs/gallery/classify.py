"""A private classifier, its doubt and its statement, in ten lines."""

from sklearn.datasets import load_digits

from confide import PrivateBayesClassifier

X, y = load_digits(return_X_y=True)
model = PrivateBayesClassifier(epsilon=3.0, delta=1e-4, bounds=(0, 16), classes=range(10), records=1500)
model.fit(X[:1500], y[:1500])
prediction = model.predictive(X[1500:])
print(f"accuracy {model.score(X[1500:], y[1500:]):.3f}, most doubtful record {int(prediction.epistemic.argmax())}")
print(model.privacy_.statement())
