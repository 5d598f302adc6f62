"""Comparisons of transfers: which link between nodes is slow."""
