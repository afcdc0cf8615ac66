"""plan: will it fit, how long, how much disk. Reads a `config.json` and the settings; loads nothing and needs no torch."""
