"""Triton kernels of the PyTorch engine."""
