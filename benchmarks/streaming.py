"""More records than memory: `python -m benchmarks.streaming [--rows 50000000] [--columns 20] [--json] [--quick]`.

Writes a Parquet file of synthetic rows to a temporary directory, maps it, and fits a regression with Poisson sampling.
Prints how fast it was written, mapped and sampled, and what the process held of its own (anonymous memory) beside the
size of the data.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import confide
from benchmarks import _harness
from benchmarks._harness import Report
from confide.data.streaming import from_parquet

GROUP = 1 << 20  # rows written at a time
BATCH, STEPS = 4096, 500


def write(path: Path, rows: int, columns: int) -> None:
    """y is a linear function of the features, plus noise."""
    import pyarrow as pa
    from pyarrow import parquet

    random = np.random.default_rng(0)
    weights = np.linspace(-1, 1, columns, dtype=np.float32)
    names = [*(f"c{place}" for place in range(columns)), "y"]
    layout = pa.schema([(name, pa.float32()) for name in names])
    with parquet.ParquetWriter(path, layout, compression="none", use_dictionary=False) as writer:
        for start in range(0, rows, GROUP):
            x = random.random((min(GROUP, rows - start), columns), dtype=np.float32) * 2 - 1
            y = x @ weights + random.standard_normal(len(x), dtype=np.float32) * 0.1
            writer.write_table(pa.table([*x.T.copy(), y], names=names), row_group_size=1 << 18)


def held() -> float:
    """Megabytes of the process's own; the pages of mapped files are the system's to drop."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def run(rows: int, columns: int, directory: Path) -> Report:
    path = directory / "rows.parquet"
    seconds: dict[str, float] = {}

    def timed(name: str, work: Any) -> Any:
        start = time.perf_counter()
        found = work()
        seconds[name] = time.perf_counter() - start
        return found

    timed("write", lambda: write(path, rows, columns))
    schema = confide.Schema(records=rows)
    before = held()
    records = timed("map", lambda: from_parquet(path, target="y", schema=schema, directory=directory))
    data = confide.PrivateData(records, None, schema=schema)
    plan = confide.plan(noise_multiplier=1.0, delta=1e-9, records=rows, batch=min(BATCH, rows // 10), steps=STEPS)
    peaks = [held()]
    module = confide.networks.linear(columns)
    method = confide.methods.SGD(learning_rate=0.3)
    fitted = timed(
        "fit", lambda: confide.fit(method, module, data, plan, progress=lambda done, total: peaks.append(held()))
    )
    weights = fitted.posterior.draws[0, :columns]
    error = float((weights - torch.linspace(-1, 1, columns)).abs().max())
    return {
        "rows": rows,
        "columns": columns,
        "data_mb": rows * (columns + 1) * 4 / 1e6,
        "file_mb": path.stat().st_size / 1e6,
        "seconds": seconds,
        "rows_mapped_per_second": rows / seconds["map"],
        "steps_per_second": STEPS / seconds["fit"],
        "records_sampled_per_second": STEPS * plan.expected_batch / seconds["fit"],
        "memory_mb": {"before": before, "peak": max(peaks), "above": max(peaks) - before},
        "epsilon": fitted.privacy.epsilon(),
        "largest_error_of_a_weight": error,
    }


def main() -> None:
    arguments = _harness.parser(__doc__)
    arguments.add_argument("--rows", type=int, default=50_000_000)
    arguments.add_argument("--columns", type=int, default=20)
    arguments.add_argument("--directory", help="where the file goes; a temporary directory is made there")
    options = arguments.parse_args()
    rows = min(options.rows, 1_000_000) if options.quick else options.rows
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        result = run(rows, options.columns, Path(directory))
    if options.json:
        _harness.print_json(result)
        return
    for name, value in result.items():
        inner = value if isinstance(value, dict) else {"": value}
        for part, number in inner.items():
            print(f"{name + (' ' + part if part else ''):30s} {number:>16,.4g}")


if __name__ == "__main__":
    main()
