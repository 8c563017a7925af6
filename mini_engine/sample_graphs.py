"""CUDA graphs from final hidden states to sampled tokens, for the steps that are not decode graphs.

A decode graph ends with its tokens. In the other steps, few of the tokens have logits, and how many depends on the
requests. So everything after the layers, that is the LM head and the sampler, is captured for each of a few numbers of
rows, and a step is padded to the next of them. On a CPU nothing is captured, and a replay calls the function again.
Explained in chapter 12.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.decode_graphs import TokensAndLogits, record, smallest_size

Sample = Callable[[Tensor, Tensor, Tensor], TokensAndLogits]  # takes hidden states, the sampler's rows, and positions


class SampleGraphs:
    """Sampling for each of a few numbers of rows, captured when it is first needed.

    Args:
        sizes: numbers of rows, ascending.
        sample: returns a token and the logits of each hidden state, without synchronizing.
        padding_row: a row of the sampler that belongs to no request.
        device: the model's.

    Attributes:
        sizes: the sizes.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        sample: Sample,
        *,
        padding_row: int,
        device: torch.device,
    ) -> None:
        self.sizes, self._sample, self._padding_row, self._device = sizes, sample, padding_row, device
        largest = max(sizes, default=0)
        self._hidden: Float[Tensor, "n hidden"] | None = None
        self._rows = torch.full((largest,), padding_row, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._captured: dict[int, Callable[[], TokensAndLogits]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # shared, as in `DecodeGraphs`

    def size_for(self, num_rows: int) -> int | None:
        """Return the smallest size that holds a step; None if there is none."""
        return smallest_size(self.sizes, num_rows)

    def run(
        self,
        size: int,
        hidden: Float[Tensor, "T hidden"],
        logit_rows: Int[Tensor, " R"],
        rows: Int[Tensor, " R"],
        positions: Int[Tensor, " R"],
    ) -> TokensAndLogits:
        """Sample a token for some of a step's tokens.

        Args:
            size: rows with padding, one of `sizes`.
            hidden: the final hidden states of all tokens.
            logit_rows: which of the tokens have logits.
            rows: the sampler's row of each of these.
            positions: the position of the token to sample.

        Returns:
            The tokens and their logits, which the next step overwrites.
        """
        replay, count = self.get(size, hidden), rows.shape[0]  # before the inputs: a capture has padding in their place
        torch.index_select(hidden, 0, logit_rows, out=self._inputs(hidden)[:count])
        self._rows[:count], self._rows[count:size] = rows, self._padding_row
        self._positions[:count] = positions
        tokens, logits = replay()
        return tokens[:count], logits[:count]

    def get(self, size: int, hidden: Float[Tensor, "T hidden"]) -> Callable[[], TokensAndLogits]:
        """Return what replays a size. It is captured at the first call, on a GPU.

        Args:
            size: rows with padding.
            hidden: hidden states of any tokens, whose size and dtype matter.
        """
        if size not in self._captured:
            self._rows[:size] = self._padding_row
            inputs = self._inputs(hidden)[:size], self._rows[:size], self._positions[:size]
            self._captured[size] = record(lambda: self._sample(*inputs), self._pool, self._device)
        return self._captured[size]

    def _inputs(self, hidden: Float[Tensor, "T hidden"]) -> Float[Tensor, "n hidden"]:
        """Return where every graph reads its hidden states."""
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self._rows.shape[0], hidden.shape[1])
        return self._hidden
