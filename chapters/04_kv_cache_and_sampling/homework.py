"""Homework of chapter 04: the cache, the flat batch, the generate loop, sampling, and where a text ends.

Two of these functions are parts of the engine. Once their checks are green, `mini-engine generate --homework` runs a
real model on your `append_kv`, your `sample`, or both.

Each function tells what it must do. Write it in place of `raise NotImplementedError`; import what you need, and add
helper functions of your own as you like. Then:

    pytest chapters/04_kv_cache_and_sampling                   # grade your work
    pytest chapters/04_kv_cache_and_sampling --hint NAME       # the next of three hints for the exercise NAME
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

    The pages of a layer's cache lie end to end, so that a slot is page * page_size + offset in the page. The tokens
    of one step belong to several sequences: their slots come in any order, with gaps. No two are equal. All other
    slots keep what they hold. Write into the tensors that you are given, and do not copy the cache: it is larger than
    everything else in the engine.

    Args:
        k_cache: the keys of one layer.
        v_cache: its values.
        k: the new keys.
        v: the new values.
        slot_mapping: the slot of each new token.

    Example: two pages of two slots. One token goes to page 1, offset 0, another to page 0, offset 1.

        >>> k_cache, v_cache = torch.zeros(4, 1, 1), torch.zeros(4, 1, 1)
        >>> k = torch.tensor([5.0, 6.0]).view(2, 1, 1)
        >>> append_kv(k_cache, v_cache, k, -k, torch.tensor([2, 1]))
        >>> k_cache.flatten().tolist(), v_cache.flatten().tolist()
        ([0.0, 6.0, 5.0, 0.0], [0.0, -6.0, -5.0, 0.0])
    """
    raise NotImplementedError


class FlatStep(NamedTuple):
    """One step of B sequences and T new tokens: arrays of a flat batch, all of dtype int64."""

    positions: Int[Tensor, " T"]
    slot_mapping: Int[Tensor, " T"]
    qo_indptr: Int[Tensor, " B+1"]
    logit_rows: Int[Tensor, " B"]


def flat_step(num_new: Sequence[int], kv_lens: Sequence[int], pages: Sequence[int], page_size: int) -> FlatStep:
    """Describe one step of a flat batch over a cache with one page for each sequence.

    Sequence b adds num_new[b] tokens, at least one, and has kv_lens[b] keys once they are stored: its new tokens are
    the last of them. All its keys lie in the page pages[b], in order of position. The new tokens of all sequences lie
    one sequence after the other.

    Args:
        num_new: new tokens of each sequence.
        kv_lens: keys of each sequence after the step.
        pages: the page of each sequence.
        page_size: slots in one page.

    Returns:
        positions: where each new token stands in its own sequence, from 0.
        slot_mapping: where its key goes: page * page_size + offset.
        qo_indptr: the first row of each sequence, and T at the end.
        logit_rows: the row of the last token of each sequence, the only one whose logits are needed.

    Raises:
        ValueError: a sequence has more keys than a page has slots: it would write into another sequence's page.

    Example: a sequence with 5 keys in page 1 adds one token, a new sequence of 2 tokens begins in page 0.

        >>> step = flat_step([1, 2], kv_lens=[6, 2], pages=[1, 0], page_size=8)
        >>> step.positions.tolist(), step.slot_mapping.tolist()
        ([5, 0, 1], [13, 0, 1])
        >>> step.qo_indptr.tolist(), step.logit_rows.tolist()
        ([0, 1, 3], [0, 2])
    """
    raise NotImplementedError


def generate_greedy(
    step: Callable[[list[int], int], Float[Tensor, " V"]],
    prompt: Sequence[int],
    *,
    eos_token_id: int,
    max_tokens: int,
) -> list[int]:
    """Continue a prompt with the likeliest token, again and again: one prefill, then decodes.

    `step(token_ids, start)` runs the model on the tokens at the positions start, start + 1, ... of the sequence,
    stores their keys and values in the cache, and returns the logits of the token that follows. It needs the keys of
    all positions before `start` in the cache. Give it the whole prompt at once, then each token as it is chosen, and
    nothing twice. It is the expensive part: do not call it for logits that nobody reads.

    Args:
        step: the model with its cache, empty at first.
        prompt: at least one token; it may contain eos_token_id. Leave it unchanged.
        eos_token_id: end after this token. It is part of the output.
        max_tokens: end after this many tokens, 1 or more.

    Returns:
        The new tokens, without the prompt.

    Example: a model that counts. After token t comes t + 1.

        >>> def count(token_ids, start):
        ...     return torch.eye(10)[token_ids[-1] + 1]
        >>> generate_greedy(count, [3, 4], eos_token_id=8, max_tokens=10)
        [5, 6, 7, 8]
        >>> generate_greedy(count, [3, 4], eos_token_id=8, max_tokens=2)
        [5, 6]
    """
    raise NotImplementedError


def filter_logits(
    logits: Float[Tensor, "R V"],
    top_k: Int[Tensor, " R"],
    top_p: Float[Tensor, " R"],
    min_p: Float[Tensor, " R"],
) -> Float[Tensor, "R V"]:
    """Set to -inf the logits of the tokens that must not be sampled. Each row has limits of its own.

    The probabilities of a row are its softmax. Three filters, in this order, each on what the one before has kept:
        1. top_k: the k largest logits stay. 0 keeps all.
        2. top_p: of what is left, renormalised so that it sums to 1, the smallest set of likeliest tokens whose
           probabilities add up to top_p or more stays. 1 keeps all.
        3. min_p: tokens with at least min_p times the largest probability of the row stay. 0 keeps all.
    The largest logit always stays. Tokens that are equal stay or go together: what equals the smallest logit kept
    stays too. Leave `logits` itself unchanged; what stays keeps its logit.

    Args:
        logits: the rows, already divided by the temperature.
        top_k: 0 or more, perhaps more than V.
        top_p: above 0, at most 1.
        min_p: 0 to 1.

    Example: two rows with the probabilities 1/2, 1/4, 1/8, 1/8. In the first row the likeliest two reach 0.6; in the
    second the three largest logits stay, and the fourth is equal to the third.

        >>> logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(2, -1)
        >>> top_k, top_p, min_p = torch.tensor([0, 3]), torch.tensor([0.6, 1.0]), torch.tensor([0.0, 0.0])
        >>> filter_logits(logits, top_k, top_p, min_p).isfinite()
        tensor([[ True,  True, False, False],
                [ True,  True,  True,  True]])
    """
    raise NotImplementedError


# Given: noise that is a function of (seed, position, token id) alone, [R, V], and the penalty for seen tokens,
# which returns new logits, or the same ones if no row has a penalty.
gumbel_noise = sampling.gumbel_noise
penalize_repetition = sampling.penalize_repetition


def sample(logits: Float[Tensor, "R V"], batch: SamplingBatch) -> Int[Tensor, " R"]:
    """Choose one token for each row.

    For each row, with its own parameters:
        1. logits = penalize_repetition(logits, batch);
        2. where batch.temperature is 0, the token is the one with the largest logit;
        3. elsewhere the logits are divided by the temperature, then filtered by top_k, top_p and min_p (filter_logits
           does that), and the token is drawn from the softmax of what is left.

    The token of a row is a function of its logits, its parameters, its seed and its position, and of nothing else:
    not of the other rows, not of its place among them, not of how often it was asked before. Other seeds and other
    positions draw independently. argmax(logits + Gumbel noise) draws from the softmax, and gumbel_noise gives noise
    that keeps the promise. You may draw in another way that keeps it, but `--homework` then reports that sampled
    tokens differ from the reference's.

    Args:
        logits: of the rows that sample.
        batch: seeds (any 64-bit integers), positions, and the parameters of each row.

    Example: a greedy row, and one whose only candidate is the largest logit.

        >>> from mini_engine import SamplingParams
        >>> from mini_engine.sampling import sampling_columns
        >>> columns = sampling_columns([SamplingParams(temperature=0.0), SamplingParams(top_k=1)])
        >>> batch = SamplingBatch.build(columns, seeds=[1, 2], positions=[7, 9])
        >>> sample(torch.tensor([[0.1, 0.9, 0.0], [2.0, 1.0, 0.0]]), batch).tolist()
        [1, 0]
    """
    raise NotImplementedError


def scan_stop(text: str, stop: Sequence[str]) -> tuple[str, str, bool]:
    """Split text at a stop string, or before an ending that may become one.

    The text grows: whatever is held now stands in front of the next piece. However it is cut into pieces, the same
    is shown in the end, and no character of a stop string ever is.

    Args:
        text: text that has not been shown yet.
        stop: stop strings, none empty; there may be none.

    Returns:
        (safe, held, stopped). With a stop string in the text: what stands before it, "", True; what follows is
        dropped. Of several, the one that is complete first counts, and of two that end together the longer. Without
        one: held is the longest ending of the text that is the beginning of a stop string, safe is what stands
        before, and stopped is False.

    Example: "E" may become "END"; "EN" may, too, until another letter follows.

        >>> scan_stop("one E", ["END"])
        ('one ', 'E', False)
        >>> scan_stop("EN" + "TER", ["END"])
        ('ENTER', '', False)
        >>> scan_stop("EN" + "D three", ["END"])
        ('', '', True)
    """
    raise NotImplementedError


def tokens_per_second(shape: ModelShape, machine: Machine, batch_size: int, context: int, dtype_bytes: int) -> float:
    """Challenge: how many tokens per second a decode can reach at most, over all sequences of the batch.

    A step gives each of `batch_size` sequences one token. It takes the longer of bytes / machine.bandwidth and
    FLOPs / machine.flops. Count, with numbers of dtype_bytes each:
        Bytes: every matrix of the model is read once, whoever shares the step: in each layer the query, key, value
            and output projections and the three matrices of the gated MLP; then the output projection to the
            vocabulary, once. (The embedding is the same matrix, and gives one row to each token: leave that out.) For
            each sequence, the keys and values of `context` tokens in every layer.
        FLOPs: for each sequence, 2 for each number of those matrices, and in every layer 4 * head_dim for each of
            `context` keys and each query head.
    Leave out activations, norms, biases, and the write of the new key.

    Args:
        shape: the model; queries have num_qo_heads * head_dim numbers, keys and values num_kv_heads * head_dim each.
        machine: its two measured rates.
        batch_size: sequences in the step.
        context: keys of each sequence.
        dtype_bytes: bytes of one number.

    Example: one layer in which every size is 1, a vocabulary of 1: 8 numbers in matrices and 2 in the cache, of one
    byte each. A memory of 5 bytes per second needs 2 seconds for one token.

        >>> machine = Machine("an abacus", "int8", bandwidth=5.0, flops=1e9)
        >>> tokens_per_second(ModelShape(1, 1, 1, 1, 1, 1, 1), machine, batch_size=1, context=1, dtype_bytes=1)
        0.5
    """
    raise NotImplementedError
