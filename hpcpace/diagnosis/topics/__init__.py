"""One module for each kind of loss: from what was measured to findings, with their evidence and their thresholds."""
