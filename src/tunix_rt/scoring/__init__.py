"""Is an answer right? Pure functions."""
