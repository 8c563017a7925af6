"""Homework of chapter 04: the cache, the ragged batch, the generate loop, and sampling.

Three of these functions are parts of the engine. Once their checks pass,
`mini-engine generate --homework` runs the embedded model on your `append_kv`, your
`sample` with your `filter_logits`, and, with `--stop`, your `scan_stop`. The last check
of `generate_greedy` runs that model on your loop.

The docstring of each function says what the function must do. Replace its line
`raise NotImplementedError`. Import what you need, and add helper functions of your own
as you like. Then:

    # grade your work
    pytest chapters/04_kv_cache_and_sampling

    # the next of three hints for the exercise NAME
    pytest chapters/04_kv_cache_and_sampling --hint NAME
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine import sampling
from mini_engine.roofline import Machine, ModelShape
from mini_engine.sampling import SamplingBatch


def append_kv(
    k_cache: Float[Tensor, "slots Hk D"],
    v_cache: Float[Tensor, "slots Hk D"],
    k: Float[Tensor, "T Hk D"],
    v: Float[Tensor, "T Hk D"],
    slot_mapping: Int[Tensor, " T"],
) -> None:
    """Store the key and the value of each new token in its slot, in place.

    The tokens of a step belong to several sequences, so their slots come in any order
    and with gaps. No two are equal. All other slots keep their contents. The two caches
    may be views with any strides, for example of a tensor that interleaves the layers.
    Do not copy a cache: it is larger than everything else that a step touches.

    Args:
        k_cache: the keys of one layer.
        v_cache: its values.
        k: the new keys.
        v: the new values.
        slot_mapping: the slot of each new token, page * page_size + offset in the page.

    Example: one token goes to slot 2, another to slot 1.

        >>> k_cache, v_cache = torch.zeros(4, 1, 1), torch.zeros(4, 1, 1)
        >>> k = torch.tensor([5.0, 6.0]).view(2, 1, 1)
        >>> append_kv(k_cache, v_cache, k, -k, torch.tensor([2, 1]))
        >>> k_cache.flatten().tolist(), v_cache.flatten().tolist()
        ([0.0, 6.0, 5.0, 0.0], [0.0, -6.0, -5.0, 0.0])
    """
    raise NotImplementedError


class FlatStep(NamedTuple):
    """One step of B sequences and T new tokens; all arrays have dtype int64."""

    positions: Int[Tensor, " T"]
    slot_mapping: Int[Tensor, " T"]
    qo_indptr: Int[Tensor, " B+1"]
    logit_rows: Int[Tensor, " B"]


def flat_step(
    num_new: Sequence[int],
    kv_lens: Sequence[int],
    pages: Sequence[int],
    page_size: int,
) -> FlatStep:
    """Describe one step of a ragged batch over a cache with one page for each sequence.

    The new tokens of all sequences are laid end to end. Sequence b has kv_lens[b] keys,
    the last num_new[b] of which belong to its new tokens. All of its keys are in page
    pages[b], in order of position.

    Args:
        num_new: number of new tokens of each sequence, 1 or more.
        kv_lens: number of keys of each sequence, once the new ones are stored.
        pages: the page of each sequence.
        page_size: number of slots in a page.

    Returns:
        positions: position of each new token in its own sequence, from 0.
        slot_mapping: the slot of each new token.
        qo_indptr: the first row of each sequence in the batch, and T at the end.
        logit_rows: the row of the last token of each sequence.

    Raises:
        ValueError: if a sequence has more keys than a page has slots. It would write
            into the page of another sequence.

    Example: a decode with 5 keys in page 1, and a prompt of 2 tokens in page 0.

        >>> step = flat_step([1, 2], kv_lens=[6, 2], pages=[1, 0], page_size=8)
        >>> step.positions.tolist(), step.slot_mapping.tolist()
        ([5, 0, 1], [13, 0, 1])
        >>> step.qo_indptr.tolist(), step.logit_rows.tolist()
        ([0, 1, 3], [0, 2])
    """
    raise NotImplementedError


def generate_greedy(
    run: Callable[[list[int], FlatStep], Float[Tensor, "B V"]],
    prompts: Sequence[Sequence[int]],
    *,
    eos_token_id: int,
    max_tokens: int,
    page_size: int,
) -> list[list[int]]:
    """Continue several prompts greedily, in one static batch.

    `run(token_ids, step)` computes one step: it stores the keys and values of the
    tokens in their slots, and returns one row of logits for each entry of
    `step.logit_rows`. Describe each step with `flat_step`. Prompt b owns page b.

    The first step computes every whole prompt (prefill). After that, each generated
    token is computed once, in the next step (decode). A request that has finished takes
    part in no further steps, and the others continue in their order. `run` is the
    expensive part, so do not call it for logits that nothing reads.

    Args:
        run: the model with its cache, empty at first.
        prompts: the token ids of each prompt, one or more. Do not modify them.
        eos_token_id: a request ends after generating this token, which is part of its
            output. In a prompt it has no effect.
        max_tokens: a request ends after generating this many tokens, 1 or more.
        page_size: number of slots in a page, enough for every request.

    Returns:
        For each prompt the generated tokens, as Python integers.

    Example: a model that counts. After token t comes t + 1.

        >>> def count(token_ids, step):
        ...     return torch.eye(10)[torch.tensor(token_ids)[step.logit_rows] + 1]
        >>> limits = {"eos_token_id": 8, "max_tokens": 3, "page_size": 8}
        >>> generate_greedy(count, [[3, 4], [6]], **limits)
        [[5, 6, 7], [7, 8]]
    """
    raise NotImplementedError


def filter_logits(
    logits: Float[Tensor, "R V"],
    top_k: Int[Tensor, " R"],
    top_p: Float[Tensor, " R"],
    min_p: Float[Tensor, " R"],
) -> Float[Tensor, "R V"]:
    """Set the logits of tokens that must not be sampled to -inf, row by row.

    The filters apply in this order, each to the tokens that the previous one kept:
        top_k: keep the k largest logits; 0 keeps all.
        top_p: renormalize the probabilities of what is left so that they sum to 1, and
            keep the smallest set of the most likely tokens whose sum is at least top_p;
            1 keeps all.
        min_p: keep tokens with at least min_p times the largest probability of the row;
            0 keeps all.

    The largest logit is always kept. Ties are decided once, at the end: a token whose
    logit equals the smallest logit that was kept is kept as well. For example, with the
    probabilities 0.4, 0.2, 0.2, 0.2, top_k = 2 leaves 2/3 and 1/3, top_p = 0.6 keeps
    the first of these, and nothing equals its logit. Compute in the dtype of `logits`.
    Kept logits are unchanged, and so is the tensor `logits` itself.

    Args:
        logits: the rows, already divided by the temperature.
        top_k: 0 or more, possibly more than V.
        top_p: above 0, at most 1.
        min_p: 0 to 1.

    Example: probabilities of 1/2, 1/4, 1/8, 1/8. In the first row two tokens reach 0.6;
    in the second, three logits are kept, and the fourth ties with the third.

        >>> logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(2, -1)
        >>> top_k, top_p = torch.tensor([0, 3]), torch.tensor([0.6, 1.0])
        >>> filter_logits(logits, top_k, top_p, torch.zeros(2)).isfinite()
        tensor([[ True,  True, False, False],
                [ True,  True,  True,  True]])
    """
    raise NotImplementedError


# Given: Gumbel noise [R, V] that is a function of (seed, position, token id).
gumbel_noise = sampling.gumbel_noise


def sample(logits: Float[Tensor, "R V"], batch: SamplingBatch) -> Int[Tensor, " R"]:
    """Choose one token for each row, by the parameters of that row.

    A row with temperature 0 takes the largest logit. Any other row divides by its
    temperature, applies `filter_logits` with batch.top_k, batch.top_p and batch.min_p,
    and draws from the softmax of what is left. Penalties and biases are not your task:
    the engine has already changed the logits where a request asks for it.

    A row's token depends on its logits, parameters, seed and position, and on nothing
    else: not on the other rows, not on its index in the batch, not on earlier calls.
    Different seeds and positions draw independently. `gumbel_noise(seeds, positions,
    vocab_size)` keeps these promises. You may draw in a different way that keeps them,
    but `--homework` then reports that sampled tokens differ from the reference's.

    Args:
        logits: one row for each token to choose. Do not modify them.
        batch: temperature, top_k, top_p, min_p, seeds (any 64-bit integers) and
            positions, each with one entry for each row.

    Example: a greedy row, and a row whose only candidate is its largest logit.

        >>> from mini_engine import SamplingParams
        >>> params = [SamplingParams(temperature=0.0), SamplingParams(top_k=1)]
        >>> batch = SamplingBatch.build(params, [1, 2], [7, 9])
        >>> sample(torch.tensor([[0.1, 0.9, 0.0], [2.0, 1.0, 0.0]]), batch).tolist()
        [1, 0]
    """
    raise NotImplementedError


def scan_stop(text: str, stop: Sequence[str]) -> tuple[str, str, bool]:
    """Split text at a stop string, or before an ending that may become one.

    The text arrives in pieces: what is held back now is put before the next piece.
    However the text is cut into pieces, the same text is shown in the end, and no
    character of a stop string ever is.

    Args:
        text: text that has not been shown yet.
        stop: the stop strings, none of them empty; there may be none.

    Returns:
        (safe, held, stopped). If the text contains a stop string: the text before it,
        "", and True; what follows it is dropped. Of several, the one that is complete
        first counts, and of two that end together, the longer. If it contains none:
        `held` is the longest ending of the text that is the beginning of a stop string,
        `safe` is the text before `held`, and `stopped` is False.

    Example: "E" may become "END", and so may "EN", until another letter follows.

        >>> scan_stop("one E", ["END"])
        ('one ', 'E', False)
        >>> scan_stop("EN" + "TER", ["END"])
        ('ENTER', '', False)
        >>> scan_stop("EN" + "D three", ["END"])
        ('', '', True)
    """
    raise NotImplementedError


def tokens_per_second(
    shape: ModelShape,
    machine: Machine,
    batch_size: int,
    context: int,
    dtype_bytes: int,
) -> float:
    """Challenge: an upper bound on the decode throughput of a whole batch.

    A step generates one token for each of `batch_size` sequences, each of which has
    `context` keys in the cache. It cannot be faster than its bytes over
    `machine.bandwidth`, nor than its FLOPs over `machine.flops`.

    Bytes, with dtype_bytes for each number: every matrix of the layers and the LM head,
    read once for the whole batch, and the keys and values of each sequence. FLOPs, for
    each sequence: two for each number of those matrices, and in attention 4 * head_dim
    for each query head, key and layer. Leave out the embedding lookup, activations,
    norms and biases, and writing the new key and value.

    Args:
        shape: the sizes of a Llama model, as in chapter 03.
        machine: a machine with its two measured rates.
        batch_size: number of sequences.
        context: number of keys of each sequence.
        dtype_bytes: bytes per number.

    Example: one layer in which every size is 1, and a vocabulary of 1: 8 numbers in
    matrices and 2 in the cache. At 5 bytes per second, 10 bytes take 2 seconds.

        >>> machine = Machine("an abacus", "int8", bandwidth=5.0, flops=1e9)
        >>> tokens_per_second(ModelShape(1, 1, 1, 1, 1, 1, 1), machine, 1, 1, 1)
        0.5
    """
    raise NotImplementedError
