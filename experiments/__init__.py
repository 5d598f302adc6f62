"""What measures hpcpace itself: benchmarks, drills, the diagnosis score, damaged input, pacing, studies in the lab.

Run a package from the repository root, as in `python -m experiments.score --quick`. Tests import from here and run
small parts with fixed seeds; nothing here imports from tests, and nothing of hpcpace imports from here.
"""
