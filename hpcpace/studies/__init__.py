"""Studies: many ordinary runs by one plan, resumable, and what all of them say together. See docs/studies.md."""
