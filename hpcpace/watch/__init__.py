"""The live state of a run from the files that its ranks write, its view, and its metrics."""
