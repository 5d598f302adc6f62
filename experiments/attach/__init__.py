"""Traces public scripts and frameworks as they are, and compares with what they did: see `__main__`."""
