"""The common clock: how far it can be trusted, and whose clock is wrong."""
