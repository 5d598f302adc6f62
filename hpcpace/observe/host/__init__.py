"""Counters of the host, of its interfaces and of this process's connections, once a second."""
