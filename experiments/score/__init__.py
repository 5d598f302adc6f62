"""Scores the diagnosis against runs with known truth, synthetic ones and jobs in the lab."""
