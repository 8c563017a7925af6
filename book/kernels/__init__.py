"""Kernels that the engine does not run: chapters 08 and 11 and experiment 09 teach and measure them."""
