"""The audit: what is wrong with a node's affinity, PCIe, GPUs, NICs and settings, and the line that mends it."""
