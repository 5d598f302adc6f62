"""`hpcpace probe`: measures what the network, the cores and the memory of a job's hosts can do."""
