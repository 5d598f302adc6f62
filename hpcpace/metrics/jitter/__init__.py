"""What waiting for the slowest rank costs, which kind of noise causes it, and how it grows with scale."""
