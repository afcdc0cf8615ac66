"""The engines. torch, transformers, jax, flax and tunix are imported here and nowhere else."""
