"""What traces mean: pure functions on arrays. Nothing here imports torch or MPI, reads files or prints."""
