"""Speed and memory against the peers in one run: `python -m benchmarks.clipping`, `.noise`, `.imports`."""
