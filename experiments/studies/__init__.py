"""Runs the nano-cluster, model-size and scaling studies in the lab."""
