"""Chunk memory: compute the keys and values of a text once, and use them at any position of any request.

A registered chunk keeps its keys and values in pages of the KV cache that no request owns. A request names the chunks
that come before its prompt. Each chunk is one level of a cascade: the request's queries attend to the keys of each
chunk and to the request's own keys, and the states are merged. There are two modes, which can be mixed:

- *Exact.* The keys of a chunk depend on the tokens before it. If a chunk is computed `after` others and used after the
  same tokens, its keys are those of a plain prompt, and so is the output.
- *Composed.* A chunk that was computed on its own, or after other tokens, is used at another position. With RoPE,
  attention depends only on distances, so the queries are rotated by the distance that the chunk has moved, and its keys
  act as if they had been computed at the new position. The output is an approximation, because the chunks have not
  attended to each other as they would in a plain prompt. PromptCache (Gim et al. 2024, section 3) reuses such chunks
  unchanged; CacheBlend (Yao et al. 2024, section 4) recomputes the most affected tokens, which this module does not.

Explained in chapter 10.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from mini_engine.chunk_file import read_chunk, write_chunk
from mini_engine.engine import LLMEngine
from mini_engine.errors import ChunkError, ChunkFileError, ConfigError, RequestError, check_positive
from mini_engine.llm import LLM, OnError, TextEngine
from mini_engine.outputs import Prompt, RequestOutput
from mini_engine.prompts import as_prompts
from mini_engine.request import Context, PinnedPages, PlacedChunk, check_prompt
from mini_engine.sampling_params import SamplingParams
from mini_engine.step_input import NO_COPIES, StepInput


@dataclass(frozen=True, eq=False)
class Chunk:
    """A registered chunk.

    Attributes:
        name: its name.
        token_ids: its tokens.
        before: the tokens after which it was computed; its first key is at position `len(before)`.
        after: name of the chunk that ends with those tokens; None if there are none.
        pinned: the pages that hold its keys and values.
    """

    name: str
    token_ids: list[int]
    before: list[int]
    after: str | None
    pinned: PinnedPages


@dataclass(frozen=True)
class ChunkUsage:
    """The memory that a chunk takes.

    Attributes:
        name: its name.
        num_tokens: its tokens.
        num_pages: its pages; the last one may be partly filled.
        num_bytes: bytes of these pages, keys and values over all layers.
        in_use: whether an unfinished request attends to it.
    """

    name: str
    num_tokens: int
    num_pages: int
    num_bytes: int
    in_use: bool


class ChunkMemory:
    """The registered chunks of an engine, by token ids. `ChunkedLLM` is its front end for text.

    When a new chunk needs room, the least recently used chunks that no unfinished request attends to are evicted.

    Args:
        engine: an engine with `attn_backend="cascade"`.
        max_pages: pages that the chunks may take together; default half of the KV cache.

    Attributes:
        engine: the engine.
        max_pages: see above.

    Raises:
        ConfigError: if the engine's backend or model cannot attend to chunks.
    """

    def __init__(self, engine: LLMEngine, max_pages: int | None = None) -> None:
        check_positive(max_chunk_pages=max_pages)
        specs, num_pages = engine.backend.specs, engine.page_table.num_pages
        if windows := [spec for spec in specs if spec.window is not None]:
            raise ConfigError(
                f"layer {windows[0].layer} sees only the last {windows[0].window} keys, but a chunk is seen by all "
                "queries or none; use a model, or options, without a sliding window"
            )
        if any(spec.alibi_slopes is not None for spec in specs):
            raise ConfigError("the model uses ALiBi, which chunks do not support; use a model with RoPE")
        if any(spec.mla is not None for spec in specs):
            raise ConfigError("the model stores latents (MLA), which chunks do not support; use a model without MLA")
        if engine.backend.planner is None:
            raise ConfigError(
                f"the {engine.config.attn_backend} backend attends only to a request's own pages; use "
                'attn_backend="cascade" for chunk memory'
            )
        self.engine, self.max_pages = engine, max(num_pages // 2, 1) if max_pages is None else max_pages
        if self.max_pages > num_pages:
            raise ConfigError(
                f"max_chunk_pages is {self.max_pages} and the KV cache has {num_pages} pages; lower the first or raise "
                "num_pages"
            )
        self._chunks: OrderedDict[str, Chunk] = OrderedDict()  # least recently used first
        self._numbers = count()

    # --- registering and using chunks ----------------------------------------------------------------------------

    def register(self, token_ids: ListLike[int], name: str | None = None, after: str | None = None) -> str:
        """Compute the keys and values of a chunk.

        Args:
            token_ids: its tokens.
            name: the name by which requests refer to it; default a new one.
            after: a chunk that comes before this one, together with the chunks that it was itself computed after.

        Returns:
            The name. Nothing is computed if the same chunk already has that name.

        Raises:
            ChunkError: if the tokens are not a valid prompt for the model, another chunk has the name, `after` is
                unknown, or there is no room.
        """

        def fill(chunk: Chunk, chain: list[Chunk]) -> None:
            for _ in self._compute(chunk.token_ids, chunk.pinned, _place(chain)):
                pass  # the keys are in the cache

        return self._add(token_ids, name, after, fill)

    def unregister(self, name: str) -> None:
        """Forget a chunk and return its pages.

        Raises:
            ChunkError: if there is no such chunk, or an unfinished request attends to it.
        """
        with self.engine.transaction():
            chunk = self._get(name)
            if chunk.pinned in self._in_use():
                raise ChunkError(
                    f"the chunk {name!r} cannot be unregistered: an unfinished request attends to it; wait until it "
                    "ends, or abort it"
                )
            del self._chunks[name]
            self._unpin_unused()

    def context(self, names: ListLike[str]) -> Context:
        """Place chunks one after another, for `LLMEngine.add_request`.

        Args:
            names: registered chunks, in the order in which their tokens come.

        Raises:
            ChunkError: if one of them is not registered, or cannot be used at its position.
        """
        if isinstance(names, str) or not isinstance(names, ListLike):
            raise ChunkError(f"chunks is a {type(names).__name__}; give a list of names of chunks")
        with self.engine.transaction():
            chunks = [self._get(name) for name in names]
            context = _place(chunks)
            moved = [c for c, placed in zip(chunks, context, strict=True) if placed.query_offset]
            if moved and any(spec.rope is None for spec in self.engine.backend.specs):
                raise ChunkError(
                    f"the chunk {moved[0].name!r} was computed at position {len(moved[0].before)}, and the keys cannot "
                    "be moved, because not every layer of the model has a known RoPE; register the chunk with after= "
                    "naming the chunk that comes before it"
                )
            for name in names:
                self._chunks.move_to_end(name)
            return context

    def is_exact(self, names: ListLike[str]) -> bool:
        """Return whether these chunks give the output of a plain prompt: each was computed after the previous ones.

        Raises:
            ChunkError: if one of them is not registered.
        """
        chunks = [self._get(name) for name in names]
        return all(chunk.before == _tokens(chunks[:i]) for i, chunk in enumerate(chunks))

    def hidden_states(self, token_ids: ListLike[int], context: Context = ()) -> Float[Tensor, "n hidden"]:
        """Run the model over tokens that follow a context, for example to compute the likelihood of a given text.

        Args:
            token_ids: the tokens, which must fit into the model's positions after the context.
            context: from `context`.

        Returns:
            The final hidden state of each token; `LanguageModel.compute_logits` takes it.

        Raises:
            RequestError: if the tokens are not a valid prompt for the model, or too few pages are free.
        """
        with self.engine.transaction():
            self._check(token_ids, sum(len(chunk.token_ids) for chunk in context))
            self._unpin_unused()
            if not self._pinned.issuperset(chunk.pinned for chunk in context):
                raise RequestError("a chunk of the context has been unregistered or evicted; register it again")
            pinned = self.engine.core.pin(self.engine.page_table.pages_for(len(token_ids)), self)
            try:
                return torch.cat(list(self._compute(token_ids, pinned, context)))
            finally:
                self.engine.core.unpin(pinned)

    # --- memory --------------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Number of pages that all chunks take together."""
        return sum(len(chunk.pinned.pages) for chunk in self._chunks.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of these pages, keys and values over all layers."""
        return self.num_pages * self._page_bytes

    def usage(self) -> list[ChunkUsage]:
        """Return the memory of each chunk, least recently used first."""
        with self.engine.transaction():
            in_use = self._in_use()
            return [
                ChunkUsage(
                    name,
                    len(chunk.token_ids),
                    len(chunk.pinned.pages),
                    len(chunk.pinned.pages) * self._page_bytes,
                    chunk.pinned in in_use,
                )
                for name, chunk in self._chunks.items()
            ]

    def evict(self, num_pages: int, keep: ListLike[str] = ()) -> list[str]:
        """Unregister the least recently used chunks that no unfinished request attends to.

        Args:
            num_pages: fewest pages that they must have together.
            keep: names of chunks that are not evicted.

        Returns:
            Their names.

        Raises:
            ChunkError: if these chunks have fewer pages; then none is evicted.
        """
        with self.engine.transaction():
            in_use = self._in_use()
            evicted: list[str] = []
            missing = num_pages
            for name, chunk in self._chunks.items():
                if missing > 0 and chunk.pinned not in in_use and name not in keep:
                    evicted.append(name)
                    missing -= len(chunk.pinned.pages)
            if missing > 0:
                raise ChunkError(
                    f"{num_pages} pages of registered chunks would have to be evicted, but only {num_pages - missing} "
                    "are not needed by unfinished requests or the new chunk; wait until requests have ended, raise "
                    "max_chunk_pages, or raise num_pages"
                )
            for name in evicted:
                self.unregister(name)
            return evicted

    # --- files ---------------------------------------------------------------------------------------------------

    def save(self, name: str, path: str | Path) -> None:
        """Write a chunk to a safetensors file: its tokens, and their keys and values in each layer.

        Raises:
            ChunkError: if there is no such chunk.
            ChunkFileError: if the file cannot be written.
        """
        with self.engine.transaction():
            chunk = self._get(name)
            write_chunk(path, self.engine.model, self.engine.cache, chunk.token_ids, chunk.before, chunk.pinned.pages)

    def load(self, path: str | Path, name: str | None = None, after: str | None = None) -> str:
        """Register a chunk from a file. Nothing is computed.

        Args:
            path: a file that `save` wrote with the same model, in the same dtype.
            name: as for `register`.
            after: as for `register`; required if the chunk was computed after another.

        Returns:
            The name.

        Raises:
            ChunkFileError: if the file holds no chunk of this model, or is damaged.
            ChunkError: as for `register`.
        """
        stored = read_chunk(Path(path), self.engine.model, self.engine.cache)
        with self.engine.transaction():
            if stored.before != _tokens(self._chain(after)):
                raise ChunkFileError(
                    f"the chunk in {path} was computed after {len(stored.before)} tokens, which differ from those of "
                    f"after={after!r}; register or load the chunks that come before it, and name the last one with "
                    "after="
                )
            return self._add(stored.token_ids, name, after, lambda chunk, _: stored.copy_to(chunk.pinned.pages))

    # --- details -------------------------------------------------------------------------------------------------

    def _add(
        self,
        token_ids: ListLike[int],
        name: str | None,
        after: str | None,
        fill: Callable[[Chunk, list[Chunk]], None],
    ) -> str:
        """Register a chunk, unless it is registered already, and return its name.

        Args:
            token_ids: its tokens.
            name: its name; default a new one.
            after: the chunk that it comes after.
            fill: writes keys and values to the chunk's pages; called with the chunk and those before it.
        """
        if not isinstance(name, str | None):
            raise ChunkError(f"the name of a chunk is {name!r}; give a string")
        tokens = list(token_ids)
        with self.engine.transaction():
            chain = self._chain(after)
            before = _tokens(chain)
            for chunk in self._chunks.values():
                if name in (None, chunk.name) and (chunk.token_ids, chunk.before) == (tokens, before):
                    self._chunks.move_to_end(chunk.name)
                    return chunk.name
            if name in self._chunks:
                raise ChunkError(f"another chunk is named {name!r}; unregister it, or give this one its own name")
            try:
                self._check(tokens, len(before))
            except RequestError as error:
                raise ChunkError(f"the chunk cannot be registered: {error}") from error
            if name is None:
                name = next(made_up for i in self._numbers if (made_up := f"chunk {i}") not in self._chunks)
            num_pages = self.engine.page_table.pages_for(len(tokens))
            chunk = Chunk(name, tokens, before, after, self._pin(num_pages, [other.name for other in chain]))
            try:
                fill(chunk, chain)
                self._chunks[name] = chunk
            finally:
                self._unpin_unused()
            return name

    def _pin(self, num_pages: int, keep: ListLike[str]) -> PinnedPages:
        """Take pages for a new chunk, and evict other chunks if there is no room."""
        if num_pages > self.max_pages:
            raise ChunkError(
                f"the chunk fills {num_pages} pages and chunks may take {self.max_pages} together; shorten it, raise "
                "max_chunk_pages, or raise num_pages"
            )
        self._unpin_unused()
        self.evict(num_pages - min(self.max_pages - self.num_pages, self.engine.core.num_pinnable), keep)
        return self.engine.core.pin(num_pages, self)

    @property
    def _pinned(self) -> set[PinnedPages]:
        return {chunk.pinned for chunk in self._chunks.values()}

    def _in_use(self) -> set[PinnedPages]:
        """Return the pinned pages that unfinished requests attend to."""
        return {chunk.pinned for request in self.engine.requests.values() for chunk in request.chunks}

    def _unpin_unused(self) -> None:
        """Return all pinned pages that hold no registered chunk, also those that an interrupt has left behind."""
        for pinned in self.engine.core.pinned - self._pinned:
            if pinned.owner is self:
                self.engine.core.unpin(pinned)

    def _get(self, name: str) -> Chunk:
        if not isinstance(name, str) or name not in self._chunks:
            raise ChunkError(
                f"there is no chunk {name!r}: it was never registered, or it has been evicted; register it"
            )
        return self._chunks[name]

    def _chain(self, after: str | None) -> list[Chunk]:
        """Return the chunks up to `after`, each of which was computed after those before it."""
        chain: list[Chunk] = []
        while after is not None:
            chain.insert(0, self._get(after))
            after = chain[0].after
        if chain and chain[-1].before != _tokens(chain[:-1]):
            raise ChunkError(
                f"a chunk that {chain[-1].name!r} was computed after has been replaced by another of its name; "
                f"unregister {chain[-1].name!r} and register it again"
            )
        return chain

    def _check(self, token_ids: ListLike[int], context_len: int) -> None:
        config = self.engine.config
        assert config.max_model_len is not None
        check_prompt(token_ids, self.engine.model.config.vocab_size, config.max_model_len, context_len)

    def _compute(
        self, token_ids: ListLike[int], pinned: PinnedPages, context: Context
    ) -> Iterator[Float[Tensor, "n hidden"]]:
        """Compute tokens that follow a context, at most a step's budget at a time, and yield their hidden states.

        Args:
            token_ids: the tokens.
            pinned: pages that receive their keys and values.
            context: the chunks before them.
        """
        engine, start = self.engine, len(_tokens(context))
        size, budget = engine.config.page_size, engine.config.max_num_batched_tokens
        for first in range(0, len(token_ids), budget):
            new = token_ids[first : first + budget]
            pages = pinned.pages[: engine.page_table.pages_for(first + len(new))]
            yield engine.executor.hidden_states(
                self._step(new, first, pages, start + size * np.arange(len(pages)), context)
            )
            engine.metrics.computed_tokens += len(new)

    def _step(
        self,
        token_ids: ListLike[int],
        first: int,
        pages: Int32[np.ndarray, " P"],
        page_positions: Int64[np.ndarray, " P"],
        context: Context,
    ) -> StepInput:
        """Return a step without a request: it samples nothing, and has no row."""
        num_new = np.array([len(token_ids)])
        _, levels = self.engine.parts.chunk_levels([context], num_new, self.engine.config.page_size)
        return StepInput(
            rows=np.zeros(1, dtype=np.int64),
            num_new=num_new,
            num_logits=np.zeros(1, dtype=np.int64),
            kv_lens=first + num_new,
            num_computed=first + num_new,
            token_ids=np.array(token_ids, dtype=np.int32),
            token_source=None,
            pages=pages,
            page_positions=page_positions,
            admitted=(),
            num_decodes=0,
            copies=NO_COPIES,
            levels=tuple(levels),
        )

    @property
    def _page_bytes(self) -> int:
        return self.engine.config.page_size * self.engine.cache.bytes_per_token


class ChunkedLLM:
    """A language model with chunk memory: texts are computed once and used in any request at any position.

    A chunk that is not computed `after` another gets the tokenizer's special tokens, such as a beginning-of-sequence
    token. A prompt after chunks gets none.

    Args:
        llm: a front end with `attn_backend="cascade"`, or a model as `LLM` takes it.
        max_chunk_pages: pages that the chunks may take together; default half of the KV cache.
        options: further arguments of `LLM`, if `llm` is a model.

    Attributes:
        llm: the front end, for requests without chunks.
        memory: the chunks, by token ids: their memory and files, and `unregister`.

    Raises:
        ConfigError: for impossible options, or if the backend or the model cannot attend to chunks.
        ModelLoadError: if the model cannot be loaded.
    """

    def __init__(
        self,
        llm: TextEngine | str | Path = "smollm2-135m-instruct",
        *,
        max_chunk_pages: int | None = None,
        **options: Any,
    ) -> None:
        if isinstance(llm, TextEngine) and options:
            raise ConfigError(
                f"the engine already exists; pass {', '.join(options)} when you build it, or give the name of a model"
            )
        if not isinstance(llm, TextEngine):
            llm = LLM(llm, **({} if "config" in options else {"attn_backend": "cascade"}) | options)
        self.llm, self.memory = llm, ChunkMemory(llm.engine, max_chunk_pages)

    def register_chunk(self, chunk: Prompt, name: str | None = None, after: str | None = None) -> str:
        """Compute the keys and values of a text.

        Args:
            chunk: a text, or token ids.
            name: the name by which `generate` refers to it; default a new one.
            after: a registered chunk. The new chunk is computed as its continuation, so it is exact there.

        Returns:
            The name. Nothing is computed if the same chunk has that name already.

        Raises:
            ChunkError: if the tokens are not a valid prompt for the model, another chunk has the name, `after` is
                unknown, or there is no room.
        """
        return self.memory.register(self.llm.tokens_of(chunk, add_special_tokens=after is None), name, after)

    def generate(
        self,
        chunks: ListLike[str] | ListLike[ListLike[str]],
        prompt: Prompt | ListLike[Prompt],
        params: SamplingParams | ListLike[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate one output for each prompt, after registered chunks.

        Args:
            chunks: names of chunks, in the order in which they come before the prompt; or such a list for each prompt.
            prompt: a text or a list of token ids, or several of them.
            params: for all prompts, or one for each; default the model's.
            on_error: "raise" the error of a prompt that cannot be served, or "return" it and serve the others.

        Returns:
            One output for each prompt, in order. Its `prompt_token_ids` begin with those of the chunks.

        Raises:
            RequestError: if a prompt cannot be served, or the numbers of prompts, chunk lists and params differ.
            ChunkError: if a chunk of a prompt is not registered, or cannot be used at its position.
        """
        prompts = as_prompts(prompt)
        contexts = [partial(self.memory.context, names) for names in _lists(chunks, len(prompts))]
        return self.llm.generate(prompts, params, contexts, on_error=on_error)

    def stream(
        self, chunks: ListLike[str], prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """Generate one output after registered chunks, and yield its text as it is generated.

        Raises:
            RequestError: if the prompt cannot be served.
            ChunkError: if a chunk is not registered, or cannot be used at its position.
        """
        return self.llm.stream(prompt, params, partial(self.memory.context, *_lists(chunks, 1)))


def _place(chunks: ListLike[Chunk]) -> Context:
    """Place chunks one after another, from position 0."""
    starts = accumulate((len(chunk.token_ids) for chunk in chunks), initial=0)
    return tuple(
        PlacedChunk(chunk.pinned, chunk.token_ids, len(chunk.before) - start)
        for chunk, start in zip(chunks, starts, strict=False)
    )


def _tokens(chunks: ListLike[Chunk] | Context) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def _lists(chunks: ListLike[str] | ListLike[ListLike[str]], num_prompts: int) -> list[ListLike[str]]:
    """Return the names of the chunks of each prompt."""
    if isinstance(chunks, str) or not isinstance(chunks, ListLike):
        raise RequestError(f"chunks is a {type(chunks).__name__}; give a list of names of chunks")
    if all(isinstance(name, str) for name in chunks):
        return [chunks] * num_prompts  # type: ignore[list-item]
    if len(chunks) != num_prompts or any(isinstance(names, str) for names in chunks):
        raise RequestError(
            f"{num_prompts} prompts but {len(chunks)} lists of chunks; give one list for all, or one for each"
        )
    return list(chunks)
