"""Trace format 1: what the file of a rank holds, and how it is recorded, written and read."""
