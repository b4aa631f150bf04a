"""A private classifier, its doubt and its statement, in ten lines."""

from matplotlib import pyplot
from sklearn.datasets import load_digits

from confide import PrivateBayesClassifier

X, y = load_digits(return_X_y=True)
model = PrivateBayesClassifier(epsilon=3.0, delta=1e-4, bounds=(0, 16), classes=range(10), records=1500)
model.fit(X[:1500], y[:1500])
prediction = model.predictive(X[1500:])
print(f"accuracy {model.score(X[1500:], y[1500:]):.3f}, most doubtful record {int(prediction.epistemic.argmax())}")
print(model.privacy_.statement())

figure, axes = pyplot.subplots(1, 6, figsize=(8, 1.9), layout="constrained")
for axis, record in zip(
    axes, prediction.epistemic.argsort(descending=True).tolist(), strict=False
):  # the most doubtful
    label = int(prediction.labels[record])
    axis.imshow(X[1500 + record].reshape(8, 8), cmap="Greys")
    axis.set(title=f"{label}? {float(prediction.probabilities[record, label]):.0%}", xticks=(), yticks=())
figure.savefig("classify.png", dpi=100)
