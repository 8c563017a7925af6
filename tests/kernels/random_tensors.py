"""Random tensors for tests of kernels that run on a GPU, or in Triton's interpreter."""

import torch


class Random:
    """Tensors in the dtype that a device is tested in, the same for each seed."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, torch.bfloat16 if device == "cuda" else torch.float32

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def tokens(self, num_tokens: int, size: int) -> torch.Tensor:
        """Tokens of very different scales; the smallest need the epsilon of the norm."""
        return self(num_tokens, size) * torch.logspace(-3, 2, num_tokens).to(self.device, self.dtype)[:, None]
