"""Regression with intervals: how often do they cover, and which part of their width would more data remove?"""

import numpy as np
from matplotlib import pyplot

from confide import PrivateBayesRegressor

rng = np.random.default_rng(0)
X = rng.uniform(-1, 1, (6000, 3))
y = 4 + 2 * X[:, 0] - X[:, 1] + rng.normal(0, 0.8, 6000)
model = PrivateBayesRegressor(epsilon=1.0, delta=1e-5, bounds=(-1, 1), target_bounds=(0, 8), records=5000)
model.fit(X[:5000], y[:5000])
prediction = model.predictive(X[5000:])
low, high = prediction.interval(0.9).numpy().T
print(f"90 % intervals cover {np.mean((low <= y[5000:]) & (y[5000:] <= high)):.3f} of new records")
parts = float(prediction.epistemic.mean()), float(prediction.aleatoric.mean())
print(f"variance that more data would remove {parts[0]:.4f}, and that it would not {parts[1]:.4f}")

shown = np.argsort(prediction.mean.numpy())[::12]  # every twelfth of the new records, by what is predicted
figure, axis = pyplot.subplots(figsize=(8, 3), layout="constrained")
axis.vlines(range(len(shown)), low[shown], high[shown], color="tab:blue", alpha=0.5, label="90 % interval")
axis.plot(range(len(shown)), y[5000:][shown], "k.", markersize=4, label="what was measured")
axis.set(xlabel="new records", ylabel="target", xticks=())
axis.legend(loc="upper left")
figure.savefig("intervals.png", dpi=100)
