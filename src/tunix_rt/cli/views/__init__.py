"""What verbs print."""
