"""Which rank should run on which host: bytes between ranks from a run, and a placement that keeps them off uplinks."""
