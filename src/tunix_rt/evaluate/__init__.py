"""Evaluation: generations for an eval set, their comparison before and after training, and the report."""
