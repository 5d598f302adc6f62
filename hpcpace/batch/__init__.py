"""Job control of a batch job: start its ranks, pass signals on, start or requeue it again, report at the end."""
