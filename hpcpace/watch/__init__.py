"""What a run does now, from the files that its ranks are writing: live state, its view, and its metrics."""
