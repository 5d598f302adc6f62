"""Hostile files of the formats that hpcpace reads, with bounds on what a command may take for them.

python -m experiments.damage.hostile [--only NAME|FORMAT ...] [--inputs 20] [--keep FOLDER]
"""
