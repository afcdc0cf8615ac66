"""Seeded recipes that write the datasets shipped with the project."""
