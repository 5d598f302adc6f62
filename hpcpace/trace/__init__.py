"""Trace format 1: what a rank's trace file holds (schema), and how it is recorded, written and read back."""
