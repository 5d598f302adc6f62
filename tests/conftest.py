"""Its place here puts tests/ on the import path, so that tests of all tiers share its modules."""
