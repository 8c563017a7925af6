"""`LLM`: text in, text out.

A front end of the engine, which takes and returns token ids: it tokenizes prompts, detokenizes outputs, and searches
the outputs for stop strings. Explained in chapter 04.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as ListLike
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from mini_engine.chat_template import Message
from mini_engine.config import EngineConfig, ResolvedConfig
from mini_engine.defaults import pick_device, pick_dtype
from mini_engine.engine import LLMEngine, OnStep
from mini_engine.errors import RequestError
from mini_engine.loading.checkpoint import load_model, load_tokenizer, open_checkpoint
from mini_engine.loading.hub import EMBEDDED_MODEL
from mini_engine.models.base import LanguageModel
from mini_engine.outputs import CompletionOutput, Piece, Prompt, RequestOutput, StepReport
from mini_engine.parts import Parts, default_parts
from mini_engine.prompts import as_prompts, needed, unpack
from mini_engine.request import Context, Request
from mini_engine.sampling_params import SamplingParams
from mini_engine.structured import GrammarCompiler, TokenGrammar
from mini_engine.text_front import TextFront
from mini_engine.text_request import Ended, PromptOutputs, TextRequest

ContextOf = Callable[[], Context]  # looks up the chunks before a prompt when it is queued
OnError = Literal["raise", "return"]
HANDOVER_SECONDS = 1e-4  # longer than it takes to wake a thread that waits for a lock


class TextEngine(TextFront):
    """Text in, text out, on one engine. Threads may share it: each gets its own outputs.

    Args:
        engine: the engine.
        tokenizer: the model's; without one, prompts are token ids and outputs have no text.
        default_params: parameters of requests that have none.
        trust_chat_template: render the tokenizer's chat template in this process; see `render_chat`.

    Attributes:
        engine: the engine itself, for requests that arrive while others run: `add_request`, then `step`.
        tokenizer: see above.
        default_params: see above.

    Raises:
        ConfigError: if the tokenizer is not one of the `tokenizers` library.
    """

    def __init__(
        self,
        engine: LLMEngine,
        tokenizer: PreTrainedTokenizerBase | None,
        default_params: SamplingParams,
        *,
        trust_chat_template: bool = True,
    ) -> None:
        super().__init__(
            tokenizer, default_params, max_model_len=engine.config.max_model_len,
            max_batch_size=engine.config.max_batch_size, vocab_size=engine.model.config.vocab_size,
            eos_token_ids=engine.eos_token_ids, scan_stop=engine.parts.scan_stop,
            trust_chat_template=trust_chat_template,
        )  # fmt: skip
        self.engine = engine
        self._texts: dict[Request, TextRequest] = {}
        self._num_finished = engine.metrics.finished
        self._numbers = count()
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.RLock()
        self._waiting: set[object] = set()  # threads that wait for the lock

    def generate(
        self,
        prompts: Prompt | ListLike[Prompt] | None = None,
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        contexts: ListLike[ContextOf] | None = None,
        *,
        prompt_token_ids: ListLike[int] | ListLike[ListLike[int]] | None = None,
        priority: ListLike[int] | None = None,
        tenant: ListLike[str] | None = None,
        use_tqdm: bool = False,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate one output for each prompt.

        Args:
            prompts: a text, a list of token ids or a dictionary with "prompt" or "prompt_token_ids", or several.
            sampling_params: for all prompts, or one for each; default `default_params`.
            contexts: the registered chunks before each prompt (see `mini_engine.chunks`); default none.
            prompt_token_ids: token ids instead of `prompts`.
            priority: a number for each prompt, lower ones first; only with `scheduling_policy="priority"`.
            tenant: the name of each prompt's sender, for `scheduling_policy="fair"`.
            use_tqdm: show a progress bar.
            on_error: what to do about a prompt that cannot be served: "raise" its error, before any work if possible,
                or "return" an output with `finish_reason="error"` and serve the other prompts.

        Returns:
            One output for each prompt, in order.

        Raises:
            RequestError: if a prompt cannot be served, or the numbers of prompts, parameters and contexts differ.
        """
        if on_error not in ("raise", "return"):
            raise RequestError(f"on_error is {on_error!r}; give 'raise' or 'return'")
        several = as_prompts(prompts if prompt_token_ids is None else prompt_token_ids)
        outputs: dict[int, RequestOutput] = {}
        turns = self._turns(len(several), priority, tenant)
        pieces = self._pieces(several, sampling_params, contexts, turns, each_step=False, on_error=on_error)
        with closing(pieces), tqdm(total=len(several), desc="prompts", disable=not use_tqdm) as bar:
            for piece in pieces:
                if piece.output:
                    outputs[piece.index] = piece.output
                    bar.update()
        return [outputs[i] for i in range(len(several))]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, context: ContextOf | None = None
    ) -> Generator[str, None, None]:
        """Generate one output and yield its text as it is generated, never half a character.

        Args:
            prompt: a prompt as in `generate`.
            sampling_params: default `default_params`.
            context: the registered chunks before the prompt; default none.

        Raises:
            RequestError: if the prompt cannot be served, or the parameters ask for several outputs.
        """
        if sampling_params and sampling_params.n > 1:
            raise RequestError(f"n is {sampling_params.n}, and a stream is one text: use stream_batch or generate")
        contexts = [context] if context else None
        with closing(self._pieces([prompt], sampling_params, contexts, each_step=True, on_error="raise")) as pieces:
            for piece in pieces:
                if piece.text:
                    yield piece.text

    def stream_batch(
        self,
        prompts: ListLike[Prompt],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        contexts: ListLike[ContextOf] | None = None,
    ) -> Generator[Piece, None, None]:
        """Generate one output for each prompt and yield the text of each as it is generated.

        Other requests of the engine are served along with these. Closing the generator ends its own requests. A prompt
        that cannot be served has an output with `finish_reason="error"`.

        Args:
            prompts: prompts as in `generate`.
            sampling_params: for all prompts, or one for each; default `default_params`.
            contexts: the registered chunks before each prompt; default none.

        Raises:
            RequestError: if the numbers of prompts, parameters and contexts differ.
        """
        return self._pieces(as_prompts(prompts), sampling_params, contexts, each_step=True, on_error="return")

    def chat(
        self,
        messages: ListLike[Message] | ListLike[ListLike[Message]],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        on_error: OnError = "raise",
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of a conversation, or of each of several.

        Args:
            messages: a conversation, or a list of them. Messages have a "role" and a "content".
            sampling_params: for all conversations, or one for each; default `default_params`.
            use_tqdm: see `generate`.
            on_error: see `generate`. A conversation that its template rejects raises always.
            options: see `chat_prompt`.

        Raises:
            RequestError: if a conversation cannot be served.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        prompts = [self.chat_prompt(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, on_error=on_error)

    def front(self) -> TextFront:
        """Return what needs no engine, for another process that turns texts into tokens."""
        return TextFront(
            self.tokenizer, self.default_params, max_model_len=self.max_model_len, max_batch_size=self.max_batch_size,
            vocab_size=self.vocab_size, eos_token_ids=self.engine.eos_token_ids,
            scan_stop=self.engine.parts.scan_stop, trust_chat_template=self.trust_chat_template,
        )  # fmt: skip

    # --- prompts that arrive while others are served ---------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        inbox: deque[Piece],
        *,
        index: int = 0,
        context: Context = (),
        grammar: TokenGrammar | None = None,
        each_step: bool = True,
        priority: int = 0,
        tenant: str = "",
    ) -> PromptOutputs:
        """Queue a prompt, and return at once; each `step` puts its new pieces into the inbox.

        Args:
            prompt: a prompt as in `generate`.
            sampling_params: default `default_params`.
            inbox: receives its pieces; several prompts may share one.
            index: the index of its pieces.
            context: registered chunks before the prompt.
            grammar: of `compile`, if the parameters have structured outputs; None compiles it now.
            each_step: deliver text as it is generated, and not only when it has ended.
            priority: as in `LLMEngine.add_request`.
            tenant: as in `LLMEngine.add_request`.

        Returns:
            The outputs so far, for `abort`.

        Raises:
            RequestError: if the prompt cannot be served.
        """
        owner = PromptOutputs(index, prompt, sampling_params or self.default_params, inbox)
        try:
            self._add(owner, each_step, context, grammar, priority, tenant)
        except RequestError:
            self.abort(owner)
            raise
        return owner

    def compile(self, params: SamplingParams) -> TokenGrammar | None:
        """Compile the grammar of structured outputs; None if the parameters have none. Any thread may call it.

        Raises:
            RequestError: if it is not supported; the message names what is not.
        """
        if params.structured_outputs is None:
            return None
        if self._compiler is None:
            vocab_size = self.engine.model.config.vocab_size
            self._compiler = GrammarCompiler(needed(self.tokenizer), vocab_size, self.engine.eos_token_ids)
        return self._compiler.compile(params.structured_outputs)

    def abort(self, submitted: PromptOutputs) -> None:
        """End a prompt now and free its pages, unless it has ended already."""
        for request in submitted.requests:
            self._texts.pop(request, None)
            self.engine.finish(request, "abort")

    def step(self) -> StepReport:
        """Step the engine once, put the new pieces of each prompt into its inbox, and return the engine's report.

        Raises:
            ScheduleError: if a scheduling part fails, or computes nothing although requests wait.
        """
        with self._turn():
            return self._step_and_deliver()

    # --- requests ------------------------------------------------------------------------------------------------

    def _turns(
        self, num_prompts: int, priority: ListLike[int] | None, tenant: ListLike[str] | None
    ) -> list[tuple[int, str]]:
        """Return the priority and the tenant of each prompt."""
        for what, given in {"priorities": priority, "tenants": tenant}.items():
            if given is not None and (isinstance(given, str) or len(given) != num_prompts):
                raise RequestError(f"{num_prompts} prompts but {given!r:.80} as {what}; give one for each prompt")
        return list(zip(priority or [0] * num_prompts, tenant or [""] * num_prompts, strict=True))

    def _pieces(
        self,
        prompts: ListLike[Prompt],
        params: SamplingParams | ListLike[SamplingParams] | None,
        contexts: ListLike[ContextOf] | None,
        turns: ListLike[tuple[int, str]] | None = None,
        *,
        each_step: bool,
        on_error: OnError,
    ) -> Generator[Piece, None, None]:
        of_each = params if isinstance(params, list | tuple) else [params or self.default_params] * len(prompts)
        if not all(isinstance(own, SamplingParams) for own in of_each):
            raise RequestError(f"sampling_params is {str(params)[:80]}; give SamplingParams, or a list of them")
        for what, given in {"SamplingParams": of_each, "contexts": contexts}.items():
            if given is not None and len(given) != len(prompts):
                raise RequestError(f"{len(prompts)} prompts but {len(given)} {what}; give one for each prompt")
        inbox: deque[Piece] = deque()
        owners: dict[int, PromptOutputs] = {}
        try:
            for index, (prompt, own) in enumerate(zip(prompts, of_each, strict=True)):
                owners[index] = PromptOutputs(index, prompt, own, inbox)
                try:
                    turn = turns[index] if turns else (0, "")
                    self._add(owners[index], each_step, contexts[index]() if contexts else (), None, *turn)
                except RequestError as refused:
                    self.abort(owners.pop(index))
                    if on_error == "raise":
                        raise _numbered(refused, index, len(prompts)) from refused
                    failed = CompletionOutput(0, "", [], "error")
                    yield Piece(index, "", 0, RequestOutput(prompt, [], [failed], refused), None)
            while owners:
                self._step(inbox)
                while inbox:
                    piece = inbox.popleft()
                    if piece.output:
                        del owners[piece.index]
                        if on_error == "raise" and (error := piece.output.error):
                            raise _numbered(error, piece.index, len(prompts)) from error
                    yield piece
        finally:
            for owner in owners.values():
                self.abort(owner)

    def _add(
        self,
        owner: PromptOutputs,
        each_step: bool,
        context: Context,
        grammar: TokenGrammar | None,
        priority: int,
        tenant: str,
    ) -> None:
        """Queue the requests of a prompt: one for each of its `n` outputs."""
        token_ids, params = self.tokens_of(owner.prompt, add_special_tokens=not context), owner.params
        owner.prompt = unpack(owner.prompt)
        several, grammar = self.core_params(params), grammar or self.compile(params)
        with self._turn():
            for index, core in enumerate(several):
                name = next(n for i in self._numbers if (n := f"stream {i}") not in self.engine.requests)
                own = grammar.copy() if grammar else None
                request = self.engine.add_request(name, token_ids, core, context, own, priority=priority, tenant=tenant)
                owner.requests.append(request)
                self._texts[request] = self.new_text(owner, index, core, request.prompt_token_ids, each_step)

    def _step(self, inbox: deque[Piece]) -> None:
        """Step the engine, unless another thread's step has filled the inbox meanwhile, and deliver the pieces."""
        if self._waiting:  # otherwise this thread, which has just released the lock, would get it again
            time.sleep(HANDOVER_SECONDS)
        with self._turn():
            if not inbox:
                self._step_and_deliver()

    def _step_and_deliver(self) -> StepReport:
        report = self.engine.step()
        finished, num_finished = report.finished, self.engine.metrics.finished
        if num_finished != self._num_finished + len(finished):  # another step ended some, or we were interrupted
            finished = [request for request in list(self._texts) if request.finish_reason]
        for request in (*report.sampled_by, *finished):
            text = self._texts.get(request)
            if text and text.first_token is None:
                text.first_token = report.start + report.seconds
            if text and (text.detokenizer or request.finish_reason):
                self._deliver(request, text, report)
        self._num_finished = num_finished
        return report

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Exclude other threads."""
        self._waiting.add(waits := object())
        try:
            with self._lock:
                self._waiting.discard(waits)
                yield
        finally:
            self._waiting.discard(waits)

    def _deliver(self, request: Request, text: TextRequest, report: StepReport) -> None:
        """Deliver what a request has got, and end it in the engine where its text ends."""
        start = len(request.prompt_token_ids) + len(text.token_ids)
        tokens = self.engine.tokens_of(request, start)
        if request.params.logprobs is not None:
            text.logprobs[len(text.token_ids) :] = [request.logprobs[start + i] for i in range(len(tokens))]
        text.token_ids += tokens
        if request.finish_reason is not None:
            text.ended = Ended.of(request)
        try:
            text.deliver(report)
        finally:
            if text.is_done:
                self._texts.pop(request, None)  # another thread may have closed its stream meanwhile
        if (reason := text.must_end) is not None:
            self.engine.finish(request, reason)


class LLM(TextEngine):
    """A language model that generates text.

    Args:
        model: "smollm2-135m-instruct" (embedded), a folder, a GGUF file, or the name of a model on the hub.
        config: the options; default `EngineConfig()`.
        trust_remote_code: the model comes from a source that you trust. Then its chat template, which is a program, is
            rendered in this process, and otherwise in a second one under limits. Python code in a model's folder is
            never run.
        parts: the engine's replaceable parts.
        on_step: called with the engine and the report of each step.
        options: fields of `EngineConfig`, instead of `config` or overriding it.

    Attributes:
        model: the loaded model.
        given_config: the options as they were given.
        default_params: the sampling parameters that the checkpoint recommends, as in vLLM.
        eos_token_ids: the tokens that end an output: those of the configurations and of the tokenizer.

    Raises:
        ConfigError: for impossible options.
        ModelLoadError: if the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path = EMBEDDED_MODEL,
        config: EngineConfig | None = None,
        *,
        trust_remote_code: bool = False,
        parts: Parts | None = None,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> None:
        config = (config or EngineConfig()).with_options(options)
        device = pick_device(config.device)
        self.given_config, self.parts = config, parts or default_parts(device)
        checkpoint = open_checkpoint(model)
        tokenizer = load_tokenizer(checkpoint) if checkpoint.has_tokenizer else None
        dtype = pick_dtype(config.dtype, device, checkpoint.dtype)
        self.model = load_model(checkpoint, self.parts, dtype, device, config.quantization)
        end = getattr(tokenizer, "eos_token_id", None)
        self.eos_token_ids = frozenset([*checkpoint.eos_token_ids, *([] if end is None else [end])])
        self._drafts: dict[str, LanguageModel] = {}
        engine = self._new_engine(config, on_step)
        trusted = trust_remote_code or model == EMBEDDED_MODEL
        super().__init__(engine, tokenizer, checkpoint.default_params, trust_chat_template=trusted)

    @property
    def config(self) -> ResolvedConfig:
        """The options, with every default resolved."""
        return self.engine.config

    def with_options(self, *, on_step: OnStep | None = None, **options: Any) -> TextEngine:
        """Build another engine on the same model, with some options changed and its own pages.

        Args:
            on_step: called with the engine and the report of each step.
            options: fields of `EngineConfig` other than dtype, quantization and device.

        Raises:
            ConfigError: for impossible options.
        """
        engine = self._new_engine(self.given_config.with_options(options), on_step)
        return TextEngine(engine, self.tokenizer, self.default_params, trust_chat_template=self.trust_chat_template)

    def _new_engine(self, config: EngineConfig, on_step: OnStep | None) -> LLMEngine:
        draft, name = None, config.speculative_config.model if config.speculative_config else None
        if name is not None:
            if name not in self._drafts:
                dtype, device = self.model.dtype, self.model.device
                self._drafts[name] = load_model(open_checkpoint(name), self.parts, dtype, device)
            draft = self._drafts[name]
        return LLMEngine(
            self.model,
            config,
            eos_token_ids=self.eos_token_ids,
            draft_model=draft,
            parts=self.parts,
            on_step=on_step,
        )


def _numbered(error: Exception, index: int, num_prompts: int) -> Exception:
    """Return the error of one of several prompts."""
    if num_prompts == 1:
        return error
    return type(error)(f'prompt {index + 1} of {num_prompts}: {error}; on_error="return" serves the others')
