"""Machines in sysfs form, which the audit reads as if it ran on them."""
