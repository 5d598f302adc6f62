"""Transfers compared: which link between nodes is slow."""
