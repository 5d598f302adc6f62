"""Hostile files of each format that a command reads, made by chance, and what reading one may cost."""
