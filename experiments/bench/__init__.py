"""Benchmarks. Each prints a ratio to a peer that it measures in the same run."""
