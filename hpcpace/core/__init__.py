"""Foundations that every part of hpcpace uses, and that use no part: errors, text, files, settings, processes."""
