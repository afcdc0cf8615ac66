"""Whether an answer is right, strictly and leniently. Pure functions."""
