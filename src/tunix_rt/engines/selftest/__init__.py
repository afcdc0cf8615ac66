"""The kernel self-test: what a run will execute, compared with float64 on the CPU."""
