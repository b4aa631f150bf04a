"""Pictures of the methods' page: every method on the same made-up records. `python docs/pictures.py` makes them anew.

Left what is predicted, right how sure the posterior is of it. Epsilon is 8, so that 1,500 records show the
method and not its noise. Methods of mixtures and of pictures have none.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "images" / "methods"
RECORDS = 1500


def two_classes() -> tuple[Any, Any]:
    """Two half moons that reach into each other."""
    from sklearn.datasets import make_moons

    x, y = make_moons(RECORDS, noise=0.2, random_state=1)
    return (x - [0.5, 0.25]) / [1.8, 1.2], y


def draw(name: str, path: Path) -> None:
    """Fit and draw one method."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    from confide import PrivateBayesClassifier

    x, y = two_classes()
    widths = {"noise-aware": (), "additive": None, "tabular": None}.get(name, (24,))
    model = PrivateBayesClassifier(
        name, epsilon=8.0, delta=1e-4, bounds=(-1, 1), classes=2, records=RECORDS, hidden=widths
    )
    model.fit(x, y)
    across = np.linspace(-1, 1, 80)
    grid = np.stack(np.meshgrid(across, across), -1).reshape(-1, 2)
    found = model.predictive(grid)
    figure, axes = pyplot.subplots(1, 2, figsize=(7.2, 3.0), layout="constrained")
    views = (
        (found.probabilities[:, 1], "probability of the second class", "RdBu", 0.0, 1.0),
        (found.epistemic, "epistemic uncertainty, nats", "viridis", 0.0, None),
    )
    for axis, (values, title, colours, low, high) in zip(axes, views, strict=True):
        image = values.reshape(80, 80).numpy()
        shown = axis.imshow(image, origin="lower", extent=(-1, 1, -1, 1), cmap=colours, vmin=low, vmax=high)
        axis.scatter(*x[:250].T, c=y[:250], s=5, cmap="Greys", edgecolors="black", linewidths=0.3)
        axis.set(title=title, xticks=(), yticks=(), xlim=(-1, 1), ylim=(-1, 1))
        figure.colorbar(shown, ax=axis, shrink=0.85)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    from confide import methods

    chosen = sys.argv[1:] or [name for name in methods.for_task("classification") if name != "features"]
    for name in chosen:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draw(name, FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
