"""The drawings of the MNIST experiments: prediction distributions, reliability, confidence, accuracy and epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from confide.evaluate import metrics
from confide.papers.base import COLOURS, MARKERS, Figure, PaperMeasure
from confide.papers.dp_bnn.fits import Fitted, MethodName

BINS = 10


def prediction_distributions(name: str, caption: str, panels: Sequence[tuple[str, Tensor]], truth: int) -> Figure:
    """Histogram over draws of every class's probability for one image (figures 6 and 13)."""
    edges = torch.linspace(0, 1, BINS + 1)

    def draw(figure: Any) -> None:
        from matplotlib import colormaps

        axes = figure.subplots(2, len(panels) // 2, sharex=True, sharey=True)
        for axis, (title, draws) in zip(axes.flat, panels, strict=True):
            classes = draws.shape[1]
            width = 0.9 / BINS / classes
            for place in range(classes):
                counts = torch.histogram(draws[:, place].cpu(), edges).hist / len(draws)
                some = counts > 0
                left = (edges[:-1] + 0.05 / BINS + place * width)[some].tolist()
                edge = {"edgecolor": "black", "linewidth": 0.8} if place == truth else {}
                colour = colormaps["tab10"](place)
                axis.bar(left, counts[some].tolist(), width, align="edge", color=colour, label=f"{place}", **edge)
            axis.set_title(title)
        for axis in axes[1]:
            axis.set_xlabel("Predicted probability")
        for axis in axes[:, 0]:
            axis.set_ylabel("Share of draws")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", title="class")

    return Figure(name, caption, draw, (10.5, 5.5))


def reliability(name: str, caption: str, panels: Sequence[tuple[str, Fitted]]) -> Figure:
    """Accuracy against confidence in bins (figures 8 to 10)."""

    def draw(figure: Any) -> None:
        axes = _grid(figure, len(panels))
        for axis, (title, found) in zip(axes, panels, strict=True):
            table = metrics.reliability(found.predicted, found.y)
            full = table.counts > 0
            centres = ((table.edges[1:] + table.edges[:-1]) / 2)[full].tolist()
            width = float(table.edges[1]) * 0.92
            axis.bar(centres, table.accuracy[full].tolist(), width, color=COLOURS[0], label="accuracy")
            low = torch.minimum(table.accuracy, table.confidence)[full].tolist()
            axis.bar(centres, table.gaps[full].tolist(), width, low, color=COLOURS[1], alpha=0.55, label="gap")
            axis.plot((0, 1), (0, 1), color=COLOURS[6], linestyle=(0, (4, 3)), linewidth=1.2)
            box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 2}
            axis.text(0.03, 0.96, f"ECE {found.ece:.3f}\nMCE {found.mce:.2f}", va="top", fontsize=9, bbox=box)
            axis.set(title=title, xlim=(0, 1), ylim=(0, 1))
        _label(axes, "Confidence", "Accuracy")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)

    return Figure(name, caption, draw, (10, 6) if len(panels) > 4 else (7, 6))


def confidences(name: str, caption: str, panels: Sequence[tuple[str, Fitted]]) -> Figure:
    """How often which confidence, with its mean and the accuracy marked (figure 7)."""

    def draw(figure: Any) -> None:
        axes = _grid(figure, len(panels))
        for axis, (title, found) in zip(axes, panels, strict=True):
            confidence = found.predicted.max(1).values
            shares = torch.histogram(confidence.float().cpu(), torch.linspace(0, 1, 21)).hist / len(confidence)
            axis.bar([0.025 + 0.05 * place for place in range(20)], shares.tolist(), 0.046, color=COLOURS[4])
            axis.axvline(float(confidence.mean()), color=COLOURS[3], linewidth=1.6, label="mean confidence")
            axis.axvline(found.accuracy, color="black", linestyle=(0, (4, 3)), linewidth=1.4, label="accuracy")
            axis.set(title=title, xlim=(0, 1))
        _label(axes, "Confidence", "Share of images")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)

    return Figure(name, caption, draw, (10, 6))


def accuracy_against_epsilon(points: Mapping[MethodName, Sequence[tuple[float, PaperMeasure]]]) -> Figure:
    """Accuracy with standard deviations (figure 1)."""

    def draw(figure: Any) -> None:
        axis = figure.subplots()
        for place, (method, found) in enumerate(points.items()):
            spread = [measured.deviation or 0.0 for _, measured in found]
            middle = [measured.mean for _, measured in found]
            style = {"color": COLOURS[place], "marker": MARKERS[place], "capsize": 3, "label": method}
            axis.errorbar([epsilon for epsilon, _ in found], middle, spread, **style)
        ticks = [epsilon for epsilon, _ in next(iter(points.values()))]
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axis.minorticks_off()
        axis.set(xlabel="Sound epsilon at delta = 1e-5", ylabel="Test accuracy")
        axis.legend()

    return Figure("accuracy_epsilon", "Accuracy against epsilon, MLP with Gaussian priors (figure 1)", draw)


def effects(panels: Sequence[tuple[str, str, Sequence[tuple[float, PaperMeasure, float]]]]) -> Figure:
    """Accuracy and sound epsilon against one setting each (figure 5)."""

    def draw(figure: Any) -> None:
        axes = figure.subplots(2, len(panels) // 2).flat
        for axis, (title, setting, found) in zip(axes, panels, strict=True):
            where = [value for value, _, _ in found]
            spread = [measured.deviation or 0.0 for _, measured, _ in found]
            accuracy = {"color": COLOURS[0], "marker": "o", "capsize": 3, "label": "accuracy"}
            axis.errorbar(where, [measured.mean for _, measured, _ in found], spread, **accuracy)
            axis.set(title=title, xlabel=setting, ylabel="Test accuracy", xscale="log")
            axis.set_xticks(where, [f"{value:g}" for value in where])
            axis.minorticks_off()
            other = axis.twinx()
            other.spines["right"].set_visible(True)
            other.plot(where, [epsilon for _, _, epsilon in found], color=COLOURS[3], marker="s", label="epsilon")
            other.set(ylabel="Sound epsilon", ylim=(0, 1.1 * max(epsilon for _, _, epsilon in found)))
            lines = [*axis.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
        figure.legend(lines, ["accuracy", "epsilon"], loc="outside lower center", ncols=2)

    return Figure("effects", "Effects of batch size and learning rate on DP-SGD and DP-SGLD (figure 5)", draw, (10, 7))


def inputs(shown: Sequence[tuple[str, Tensor]]) -> Figure:
    """The images that the prediction distributions are about (figure 12)."""

    def draw(figure: Any) -> None:
        for axis, (title, pixels) in zip(figure.subplots(1, len(shown)), shown, strict=True):
            side = round(len(pixels) ** 0.5)
            axis.imshow(pixels.reshape(side, side).numpy(), cmap="gray")
            axis.set(title=title, xticks=[], yticks=[])

    return Figure("predictions_inputs", "A hard and an easy test image (figure 12)", draw, (5.0, 2.8))


def _grid(figure: Any, count: int) -> list[Any]:
    return list(figure.subplots(2, count // 2, sharex=True, sharey=True).flat)


def _label(axes: Sequence[Any], across: str, up: str) -> None:
    columns = len(axes) // 2
    for axis in axes[columns:]:
        axis.set_xlabel(across)
    for axis in axes[::columns]:
        axis.set_ylabel(up)
