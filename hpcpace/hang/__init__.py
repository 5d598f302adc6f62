"""Who holds up whom in a job that no longer moves: what ranks are known to be in, and what follows from it."""
