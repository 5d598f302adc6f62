"""The figures of a summary, a module for each section of the report."""
