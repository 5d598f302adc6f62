"""Who holds up whom in a job that no longer moves, from what its ranks are known to be in."""
