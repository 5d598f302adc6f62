"""Watching a training job: its collectives, phases, counters, and the session around them."""
