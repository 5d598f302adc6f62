"""The report as a page that opens without a network."""
