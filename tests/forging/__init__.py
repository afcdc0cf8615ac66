"""Forgeries of a good bundle: each edits files only, and rebuilds every hash, chain, figure and sentence that it can."""
