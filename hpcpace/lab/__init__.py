"""Clusters on one machine, for trying and testing hpcpace without a real cluster: real Slurm in its own namespaces."""
