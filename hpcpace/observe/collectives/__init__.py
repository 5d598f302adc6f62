"""Observation of the collectives of torch.distributed."""
