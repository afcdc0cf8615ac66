"""The final model as other tools load it, and the check that it loads."""
