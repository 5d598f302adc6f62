"""Clusters for trying hpcpace and testing it where there is none: real Slurm, started from a folder of its own."""
