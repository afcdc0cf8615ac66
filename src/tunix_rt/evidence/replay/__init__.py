"""Levels L2 to L4: the verifier's own code generates answers and takes steps again, and compares them with the record."""
