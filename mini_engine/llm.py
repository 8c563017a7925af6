"""`LLM`: text in, text out."""

from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as ListLike
from pathlib import Path

import jinja2
import psutil
import torch
from transformers import PreTrainedTokenizerBase

from mini_engine.attention.backend import check_backend
from mini_engine.engine import LLMEngine
from mini_engine.errors import ConfigError, RequestError, check_positive
from mini_engine.loading.checkpoint import load_model, load_tokenizer, open_checkpoint
from mini_engine.models.base import CausalLM
from mini_engine.outputs import Piece, Prompt, RequestOutput, StepReport
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams
from mini_engine.sequence import prompt_tokens

Message = Mapping[str, str]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# Of a computer's memory; a GPU has nothing else to do with its own, and gives nine tenths of what the weights leave.
MOST_CPU_CACHE_BYTES = 2 * 2**30


class LLM:
    """A language model that generates text.

    Args:
        model: "smollm2-135m-instruct" (embedded), a folder, a GGUF file, or the name of a model on the hub.
        dtype: "auto" (the checkpoint's, but float32 on a CPU without bfloat16 instructions) or a name of DTYPES.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        attn_backend: name of the attention backend.
        max_batch_size: requests that run at once; more wait for their turn.
        max_model_len: longest prompt and output together; default the model's own limit.
        num_pages: pages of the KV cache; default enough for `max_batch_size` of the longest requests, or as many as
            the memory has room for.
        page_size: tokens of a page.
        max_num_batched_tokens: most tokens in one step; longer prompts are computed in chunks.
        sliding_window: lets no layer see further back than this many keys; default the model's own windows.
        prefix_sharing: let requests that begin with the same tokens share pages.
        parts: the engine's replaceable parts.

    Attributes:
        engine: the engine itself, for requests that come while others run: `add_request`, then `step`.

    Raises:
        ConfigError: for an option that cannot be.
        ModelLoadError: if the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m-instruct",
        *,
        dtype: str = "auto",
        device: str = "auto",
        attn_backend: str = "torch",
        max_batch_size: int = 32,
        max_model_len: int | None = None,
        num_pages: int | None = None,
        page_size: int = 128,
        max_num_batched_tokens: int = 2048,
        sliding_window: int | None = None,
        prefix_sharing: bool = False,
        parts: Parts | None = None,
    ) -> None:
        check_backend(attn_backend)
        check_positive(
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            num_pages=num_pages,
            page_size=page_size,
            max_num_batched_tokens=max_num_batched_tokens,
            sliding_window=sliding_window,
        )
        where = pick_device(device)
        parts = parts or Parts()
        checkpoint = open_checkpoint(model)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(checkpoint)
        self.model: CausalLM = load_model(checkpoint, parts, pick_dtype(dtype, where, checkpoint.dtype), where)
        self.eos_token_ids = frozenset(checkpoint.eos_token_ids)
        self.max_batch_size = max_batch_size
        self.attn_backend = attn_backend
        self.parts = parts
        longest = self.model.config.max_position_embeddings
        self.max_model_len = longest if max_model_len is None else max_model_len
        if not 2 <= self.max_model_len <= longest:
            raise ConfigError(f"max_model_len is {self.max_model_len}; this model takes 2 to {longest} tokens")
        if num_pages is None:
            num_pages = default_num_pages(self.model, page_size, max_batch_size * -(-self.max_model_len // page_size))
        self.sliding_window, self.prefix_sharing = sliding_window, prefix_sharing
        self.engine = self.make_engine(
            num_pages=num_pages, page_size=page_size, max_num_batched_tokens=max_num_batched_tokens
        )

    @property
    def small_page_size(self) -> int:
        """Tokens of a page small enough to watch: 16, or what FlexAttention's kernels want on a GPU."""
        on_gpu = next(self.model.parameters()).is_cuda
        return 128 if on_gpu and self.attn_backend == "flex" else 16

    def make_engine(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_batched_tokens: int = 2048,
        on_step: Callable[[LLMEngine, StepReport], None] | None = None,
    ) -> LLMEngine:
        """Another engine on the same model and with the same options, but with pages of its own.

        Args:
            num_pages: pages of its KV cache.
            page_size: tokens of a page.
            max_num_batched_tokens: most tokens in one step; fewer than `max_batch_size` let fewer sequences run.
            on_step: called after each step, as by `LLMEngine`.

        Raises:
            ConfigError: for a pool or a step that cannot be.
        """
        return LLMEngine(
            self.model,
            self.tokenizer,
            self.eos_token_ids,
            attn_backend=self.attn_backend,
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=min(self.max_batch_size, max(1, max_num_batched_tokens)),
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.max_model_len,
            sliding_window=self.sliding_window,
            prefix_sharing=self.prefix_sharing,
            parts=self.parts,
            on_step=on_step,
        )

    def generate(
        self, prompts: Prompt | ListLike[Prompt], params: SamplingParams | ListLike[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Generate one output for each prompt.

        Args:
            prompts: a text or a list of token ids, or several of them.
            params: for all prompts, or one for each; default `SamplingParams()`.

        Returns:
            One output for each prompt, in order. Where several prompts are given, one that cannot be served has
            `finish_reason="error"` and the others are served all the same.

        Raises:
            RequestError: if the only prompt cannot be served, or the numbers of prompts and params differ.
        """
        return self.engine.generate(prompts, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[str, None, None]:
        """Generate one output and yield its text as it comes, never half a character.

        Raises:
            RequestError: if the prompt cannot be served.
        """
        return self.engine.stream(prompt, params)

    def stream_batch(
        self, prompts: ListLike[Prompt], params: SamplingParams | ListLike[SamplingParams] | None = None
    ) -> Generator[Piece, None, None]:
        """Generate one output for each prompt and yield every piece of text as it comes, with the step it came from.

        Raises:
            RequestError: if the numbers of prompts and params differ.
        """
        return self.engine.stream_batch(prompts, params)

    def chat(
        self,
        messages: ListLike[Message],
        params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
    ) -> RequestOutput:
        """Generate the next message of a conversation.

        Args:
            messages: each with a "role" and a "content".
            params: default `SamplingParams()`.
            chat_template: a Jinja template; default the model's own.

        Raises:
            RequestError: if the conversation cannot be served.
        """
        return self.generate(self.chat_prompt(messages, chat_template=chat_template), params)[0]

    def chat_prompt(self, messages: ListLike[Message], *, chat_template: str | None = None) -> list[int]:
        """Return the tokens that a conversation becomes, up to where the model's answer begins.

        Raises:
            RequestError: if there is no chat template, or it does not take these messages.
        """
        if chat_template is None and not self.tokenizer.chat_template:
            raise RequestError("this model has no chat template; pass chat_template, or use generate with plain text")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], chat_template=chat_template, add_generation_prompt=True, tokenize=False
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(f"the chat template does not take these messages: {error}") from error
        return prompt_tokens(self.tokenizer, str(text), add_special_tokens=False)


def pick_device(name: str) -> torch.device:
    """Return the device of that name. Raises ConfigError if this machine has none such."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but PyTorch sees no GPU here; use device='cpu'")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, checkpoint_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of that name; "auto" is the checkpoint's where the device computes in it natively.

    Raises:
        ConfigError: if there is no such dtype.
    """
    if name == "auto":
        slow = device.type == "cpu" and checkpoint_dtype != torch.float32 and not _cpu_has_bfloat16()
        return torch.float32 if slow or checkpoint_dtype not in DTYPES.values() else checkpoint_dtype
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; choose auto or one of: {', '.join(DTYPES)}")
    return DTYPES[name]


def _cpu_has_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def default_num_pages(model: CausalLM, page_size: int, most: int) -> int:
    """Pages for the KV cache: as many as can be used, or as the memory beside the weights has room for.

    Args:
        model: on its device.
        page_size: tokens of a page.
        most: pages that can be used at all.

    Raises:
        ConfigError: if there is no room for a single one.
    """
    weight = next(model.parameters())
    layers = {spec.kv_layer: spec for spec in model.attention_specs}.values()
    page_bytes = page_size * weight.element_size() * sum(2 * spec.num_kv_heads * spec.head_dim for spec in layers)
    if weight.is_cuda:
        room = torch.cuda.mem_get_info(weight.device)[0] * 9 // 10
    else:
        room = min(psutil.virtual_memory().available // 2, MOST_CPU_CACHE_BYTES)
    if room < page_bytes:
        raise ConfigError(f"a page of the KV cache takes {page_bytes} bytes and {room} are free; lower page_size")
    return min(most, room // page_bytes)
