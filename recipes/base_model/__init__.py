"""How the shipped model `tiny-gemma3` was made: its corpus, its tokenizer, its pretraining."""
