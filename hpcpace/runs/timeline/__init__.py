"""Some steps of a run as a file for Perfetto: rank by rank, on the common clock."""
