"""What waiting for the slowest costs, to what kind of noise, and how it grows."""
