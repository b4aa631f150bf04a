"""Tests that run on whatever device they are given."""
