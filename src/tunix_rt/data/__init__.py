"""From a dataset to rows of token ids: read strictly, render with the question masked, pack with exact boundaries."""
