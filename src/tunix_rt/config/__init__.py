"""Settings of a run: typed, old spellings, loading, rules."""
