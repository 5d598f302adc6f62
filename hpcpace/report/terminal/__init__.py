"""The report on a terminal or in a Slurm log."""
