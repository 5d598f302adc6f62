"""`hpcpace trace`: becomes a program, and records those of its processes that train."""
