"""Watching a training job: its collectives, its phases, its network and host counters, and the session around them."""
