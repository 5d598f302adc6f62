"""A run as data frames, for analyses of your own: `hpcpace.load` and `hpcpace.load_many`; see docs/python.md."""
