"""What a run wrote down about itself: run.json, result.json, trial.json."""
