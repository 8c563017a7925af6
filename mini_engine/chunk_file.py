"""The file of a chunk: its tokens, and their keys and values in each layer, in safetensors. Explained in chapter 10."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mini_engine.errors import ChunkFileError, WeightFileError
from mini_engine.kv_cache.page_table import Pages
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.loading.checkpoint import open_safetensors
from mini_engine.models.base import LanguageModel

FORMAT = "mini_engine chunk 1"
KINDS = "keys", "values"


@dataclass(frozen=True, eq=False)
class StoredChunk:
    """A chunk that has been read from a file and checked.

    Attributes:
        token_ids: its tokens.
        before: the tokens after which it was computed.
        tensors: for each layer its keys and values, [n, KV heads, head size] each, by their names in the file.
        cache: the KV cache that they are for.
    """

    token_ids: list[int]
    before: list[int]
    tensors: dict[str, Tensor]
    cache: PagedKVCache

    def copy_to(self, pages: Pages) -> None:
        """Write keys and values to some pages of the cache."""
        slots = _slots(self.cache, pages, len(self.token_ids))
        for name, cached in _cache_tensors(self.cache).items():
            cached[slots] = self.tensors[name].to(cached.device)


def write_chunk(
    path: str | Path,
    model: LanguageModel,
    cache: PagedKVCache,
    token_ids: Sequence[int],
    before: Sequence[int],
    pages: Pages,
) -> None:
    """Write the keys and values of some tokens to a file.

    Args:
        path: the file.
        model: the model that computed them.
        cache: the KV cache that holds them.
        token_ids: the tokens.
        before: the tokens after which they were computed.
        pages: their pages, from the start of the first one.

    Raises:
        ChunkFileError: if the file cannot be written.
    """
    slots = _slots(cache, pages, len(token_ids))
    tensors = {name: cached[slots].cpu() for name, cached in _cache_tensors(cache).items()}
    metadata = {
        "format": FORMAT,
        "model": model.identity,
        "token_ids": json.dumps(list(token_ids)),
        "before": json.dumps(list(before)),
    }
    try:
        save_file(tensors, path, metadata)
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: a path with a null byte
        raise ChunkFileError(f"the chunk cannot be written to {path}: {error}") from error


def read_chunk(path: Path, model: LanguageModel, cache: PagedKVCache) -> StoredChunk:
    """Read a file that `write_chunk` wrote with the same model, and check it.

    Raises:
        ChunkFileError: if the file holds no chunk of this model in the dtype of the cache, or is damaged.
    """
    try:
        stored = open_safetensors(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (OSError, ValueError, SafetensorError) as error:
        raise ChunkFileError(f"{path} cannot be read: {error}") from error
    except WeightFileError as error:
        raise ChunkFileError(str(error)) from error
    if metadata.get("format") != FORMAT:
        raise ChunkFileError(f"{path} holds no chunk of this engine; give a file that `ChunkMemory.save` has written")
    if metadata.get("model") != model.identity:
        raise ChunkFileError(f"the chunk in {path} was computed by another model; register its text with this one")
    vocab_size = model.config.vocab_size
    token_ids, before = (_stored_tokens(path, metadata.get(key), vocab_size) for key in ("token_ids", "before"))
    expected = _cache_tensors(cache)
    for name in expected.keys() | stored.keys():
        cached, header = expected.get(name), stored.headers.get(name)
        if cached is None or header is None or header.shape != (len(token_ids), *cached.shape[2:]):
            raise ChunkFileError(f"{path} is damaged: {name[:40]!r} does not have a row for each token; save it again")
        if header.dtype != cached.dtype:
            raise ChunkFileError(
                f"the chunk in {path} is stored in {header.dtype} and the KV cache in {cached.dtype}; build the "
                "engine with that dtype, or register the text again"
            )
    tensors = {name: stored[name] for name in expected}
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise ChunkFileError(f"{path} is damaged: it holds numbers that are not finite; save it again")
    return StoredChunk(token_ids, before, tensors, cache)


def _cache_tensors(cache: PagedKVCache) -> dict[str, Shaped[Tensor, "pages size Hk D"]]:
    """Return views of the keys and values of all layers, by their names in a file."""
    named = {f"{i}.{kind}": pages for i, kv in enumerate(cache.layers) for kind, pages in zip(KINDS, kv, strict=True)}
    return named if cache.layout == "NHD" else {name: pages.transpose(1, 2) for name, pages in named.items()}


def _slots(cache: PagedKVCache, pages: Pages, num_tokens: int) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
    """Return the page of each token, and its offset in the page."""
    index = torch.arange(num_tokens, device=cache.device)
    on_device = torch.as_tensor(pages).to(index.device, torch.long)
    return on_device[index // cache.page_size], index % cache.page_size


def _stored_tokens(path: Path, text: str | None, vocab_size: int) -> list[int]:
    """Read token ids from a file's metadata."""
    try:
        tokens = json.loads(text or "")
    except (ValueError, RecursionError):
        tokens = None
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise ChunkFileError(f"{path} is damaged: its metadata holds no token ids of this model; save it again")
    return tokens
