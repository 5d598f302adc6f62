"""Feeds damaged, foreign and contradictory files to `hpcpace report` and checks what it does."""
