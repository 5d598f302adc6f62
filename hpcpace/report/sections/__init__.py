"""The sections of all documents: one module a topic, from figures to a `hpcpace.report.document.Section`."""
