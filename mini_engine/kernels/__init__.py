"""Triton kernels, each with its PyTorch reference."""
