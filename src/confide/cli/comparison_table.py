"""A comparison as text: the table within 80 columns, how sure its differences are, and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from confide.cli.output import one_line, remarks
from confide.wording import METRICS, delta, epsilon, measure, measure_spread

if TYPE_CHECKING:
    from confide.workflow.compare import Comparison


def show(console: Console, found: Comparison, summary: dict[str, Any]) -> None:
    """The table, and what it cost."""
    console.print(_table(found))
    console.print()
    console.print(
        f"* the best by {METRICS[found.utility].full}; ~ not told from it by {found.inputs} test records "
        f"({found.source}; not protected). ± is one standard error; memory is the most that a fit held beyond what "
        "was in use before it."
    )
    baseline = "most frequent class" if found.utility == "accuracy" else "mean of the test records"
    nothing = measure(found.utility, found.baseline)
    console.print(f"Without learning, the {baseline} gives {METRICS[found.utility].full} {nothing}.")
    for name, reason in found.not_run.items():
        console.print(escape(one_line(f"{name} did not run: {reason}")))
    console.print()
    console.print(escape(cost_sentence(found)))
    if summary["out"]:
        console.print(f"Written to {escape(one_line(summary['out']))}: report.html, comparison.json")
    else:
        remarks().print("Add --out DIR for the report and the fitted models.")


def cost_sentence(found: Comparison) -> str:
    if found.seeded:
        return "Seeded: no privacy claim. The noise can be computed by anyone who knows the seed."
    return (
        f"Each fit alone costs epsilon {found.epsilon_each:g}. Comparing reads the records once per fit: the "
        f"{found.fits} fits of this table together cost epsilon {epsilon(found.total_epsilon)} at delta "
        f"{delta(found.delta)}, and that is what was spent."
    )


def _table(found: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("Method", no_wrap=True)
    columns = [name for name in found.columns if name not in ("brier", "width_90", "crps")]  # in the report
    for name in (*(METRICS[column].short for column in columns), "Time", "Memory", "Stored"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        mark = " *" if row.best else " ~" if row.as_good else ""
        spread = {found.utility: row.errors.get(found.utility)}  # of the others in the report
        cells = [_cell(name, row.metrics[name], spread.get(name)) for name in columns]
        peak = "-" if row.peak_mb is None else f"{row.peak_mb:.0f} MB"
        numbers = (f"{row.seconds:.1f} s", peak, f"{row.storage_mb * 1024:.0f} kB")
        table.add_row(row.method + mark, *cells, *numbers, style="bold" if row.best else "")
    return table


def _cell(name: str, value: float, error: float | None) -> str:
    text = measure(name, value)
    return f"{text} {measure_spread(name, error)}" if error is not None else text
