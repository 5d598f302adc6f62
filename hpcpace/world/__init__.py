"""Who this process is among the ranks of a job, how the ranks reach each other, and what time it is."""
