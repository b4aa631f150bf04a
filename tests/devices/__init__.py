"""Runs on other devices than the host."""
