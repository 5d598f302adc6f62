"""Which leaf switch each host is at, from a file: Slurm's, or one of the user's own."""
