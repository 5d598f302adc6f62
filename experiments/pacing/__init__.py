"""Measures what pacing does to step times, one experiment per module."""
