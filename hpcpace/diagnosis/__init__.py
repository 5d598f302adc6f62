"""From a run directory to a summary of what was found in it: loading, measuring, figures, modes, verdict."""
