"""Clusters on one machine, to try and test hpcpace: real Slurm in its own namespaces."""
