"""Predictions of many draws at once: stacked networks, and averages that never hold all draws in memory."""
