"""What a stranger can check of a run: hashes over its files (`hashes`) and the source that made it (`source`)."""
