"""The common clock: offsets, how well it holds, and whose clock is wrong."""
