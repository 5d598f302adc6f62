"""Own work, and who is late by it."""
