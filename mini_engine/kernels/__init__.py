"""Faster parts of the engine: kernels in Triton and CUDA, FlashInfer's kernels, and fused layers."""
