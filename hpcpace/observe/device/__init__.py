"""Observation of this rank's GPU."""
