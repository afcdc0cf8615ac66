"""Configurations of other trainers: one table per dialect, and the function that reads a file by its table."""
