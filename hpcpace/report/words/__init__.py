"""Sentences that the terminal and the page share."""
