"""Pacing inside a running job: when to hold back a rank, and whether that helps."""
