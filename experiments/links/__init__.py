"""Proves in the lab that the right link is named: `python -m experiments.links`."""
