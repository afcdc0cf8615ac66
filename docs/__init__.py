"""The pages of tunix-rt, and what keeps them in step with the code (`python -m docs.generate`)."""
