"""Runs beyond a single report: what others recorded of them, brought into the form of hpcpace."""
