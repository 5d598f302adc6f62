"""Job control of a batch job: start its ranks, pass signals on, requeue it, report."""
