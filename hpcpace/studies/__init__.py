"""Studies: many ordinary runs from one plan, resumable, and what they show together. See docs/scale.md."""
