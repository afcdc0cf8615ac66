"""Where a model comes from: hub id, folder, GGUF or preset, and its files."""
