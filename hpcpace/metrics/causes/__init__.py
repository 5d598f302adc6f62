"""Where waiting began, and what the step would take without it."""
