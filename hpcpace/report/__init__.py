"""What users see of a run. Nothing here computes beyond rounding: the numbers come from `hpcpace.diagnosis`."""
