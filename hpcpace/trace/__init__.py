"""Trace format 1: what a rank's trace file holds (schema), recording it, writing it, reading it back."""
