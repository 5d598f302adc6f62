"""Each rank's own work, and who is late because of it."""
