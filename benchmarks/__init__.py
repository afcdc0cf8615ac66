"""What produces every number in the docs. Raw output is kept in `benchmarks/results/`."""
