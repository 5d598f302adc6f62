"""The rules: one function each, from the facts of a host or a job to findings."""
