"""dev-reasoning-v2: short problems with worked steps, generated from templates and checked from text."""
