"""Levels L2 to L4: answers generated and steps taken again, by the verifier's own code, and held against the recorded ones."""
