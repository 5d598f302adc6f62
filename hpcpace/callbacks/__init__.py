"""Sessions for training loops that frameworks own: each module needs its framework only when it is imported."""
