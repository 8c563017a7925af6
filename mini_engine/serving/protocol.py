"""What clients send: OpenAI's requests, with vLLM's further sampling parameters, checked by pydantic.

A field that is not listed is refused by name. Fields that only OpenAI's own service uses are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mini_engine.errors import RequestError
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.parts_of_output import with_parsed_arguments
from mini_engine.structured import StructuredOutputsParams, close_objects

MOST_OUTPUTS, MOST_STOPS, MOST_PROMPTS, MOST_LOGPROBS, MOST_TOOLS = 128, 64, 1024, 20, 128
# Fields of SamplingParams that a request may have under the same name.
SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "bad_words", "allowed_token_ids",
    "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip


class StreamOptions(BaseModel):
    """Which chunks of a stream have token counts.

    Attributes:
        include_usage: a last chunk without choices has them.
        continuous_usage_stats: every chunk has them, too.
    """

    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class StructuredOutputs(BaseModel):
    """The fields of `StructuredOutputsParams`."""

    model_config = ConfigDict(extra="forbid")
    json_: StrictStr | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: StrictBool | None = None
    regex: StrictStr | None = None
    choice: list[StrictStr] | None = None
    grammar: StrictStr | None = None

    def params(self) -> StructuredOutputsParams:
        """Return the engine's parameters."""
        return StructuredOutputsParams(self.json_, bool(self.json_object), self.regex, self.choice, self.grammar)


class Request(BaseModel):
    """The fields that chats and completions share. Those of `SamplingParams` have its meaning; None is its default.

    Attributes:
        model: the served model's name; None: whichever is served.
        stream: send the text as it is generated, as server-sent events.
        stream_options: only with `stream`.
        logit_bias: token ids, as strings, and numbers that are added to their logits.
        structured_outputs: what the text must be, as in vLLM.
        priority: lower is served first, as in vLLM; only if the engine's scheduling policy is "priority".
        user: the tenant, if the engine's scheduling policy is "fair".
        metadata: ignored, like the fields after it.
    """

    model_config = ConfigDict(extra="forbid")
    model: StrictStr | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(le=MOST_OUTPUTS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: StrictInt | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: StrictInt | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = None
    bad_words: list[StrictStr] | None = None
    allowed_token_ids: list[StrictInt] | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: StructuredOutputs | None = None
    max_tokens: StrictInt | None = None
    priority: StrictInt | None = None
    user: StrictStr | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    def sampling_params(self, default: SamplingParams, **own: Any) -> SamplingParams:
        """Return the parameters of the request.

        Args:
            default: those of the model, for fields that the request does not have.
            own: parameters that the kind of the request determines.

        Raises:
            RequestError: for a value out of range.
        """
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for streams; leave it out, or set stream to true")
        if self.logit_bias:
            if wrong := [token for token in self.logit_bias if not token.isdecimal()]:
                raise RequestError(f"logit_bias has the key {wrong[0][:40]!r}; give token ids")
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.structured_outputs is not None:
            given["structured_outputs"] = self.structured_outputs.params()
        values: dict[str, Any] = {name: getattr(default, name) for name in SamplingParams.__dataclass_fields__}
        return SamplingParams(**values | given | own)


class CompletionRequest(Request):
    """`POST /v1/completions`.

    Attributes:
        prompt: a text, its tokens, or several of either.
        max_tokens: 16 by default, as in OpenAI's API.
        logprobs: log probabilities of this many likeliest tokens, and of each sampled one.
        echo: put the prompt before each output.
        best_of: only equal to `n`.
        suffix: not supported.
    """

    prompt: StrictStr | list[StrictInt] | Annotated[list[StrictStr | list[StrictInt]], Field(max_length=MOST_PROMPTS)]
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: StrictBool | None = False
    best_of: StrictInt | None = None
    suffix: None = None

    def prompts(self) -> list[str | list[int]]:
        """Return one prompt or several as a list."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)

    def params(self, default: SamplingParams) -> SamplingParams:
        """Return the sampling parameters; see `sampling_params`."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(f"best_of is {self.best_of}, and n is {self.n or 1}; leave best_of out")
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        echoed = self.logprobs if self.echo else None
        return self.sampling_params(default, max_tokens=max_tokens, logprobs=self.logprobs, prompt_logprobs=echoed)


class JSONSchema(BaseModel):
    """A schema of `ResponseFormat`; `name` and `description` are for the reader."""

    model_config = ConfigDict(extra="forbid")
    name: StrictStr
    description: StrictStr | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(BaseModel):
    """The format of an answer: text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    def params(self) -> StructuredOutputsParams | None:
        """Return the engine's parameters; None for text.

        Raises:
            RequestError: if the type and the schema do not belong together.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError('response_format needs json_schema with the type "json_schema", and with no other')
        if self.json_schema is None:
            return StructuredOutputsParams(json_object=True) if self.type == "json_object" else None
        schema = self.json_schema.schema_
        return StructuredOutputsParams(json=close_objects(schema) if self.json_schema.strict else schema)


class Function(BaseModel):
    """A function that the model may call; its parameters are a JSON schema."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: StrictStr | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: StrictBool | None = None


class Tool(BaseModel):
    """A tool of a chat."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="forbid")
    name: StrictStr


class NamedTool(BaseModel):
    """The tool that the model must call."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Request):
    """`POST /v1/chat/completions`.

    Attributes:
        messages: the conversation. The content of a message is a text, or a list of parts with a text each.
        max_tokens: as many as the model takes by default.
        max_completion_tokens: the newer name of `max_tokens`.
        logprobs: return the log probability of each token.
        top_logprobs: and those of this many of the likeliest tokens.
        response_format: text or JSON.
        tools: functions that the model may call.
        tool_choice: whether it must call one, and which; default "auto".
        parallel_tool_calls: whether it may call several at once; default yes.
        chat_template_kwargs: further variables of the chat template.
        add_generation_prompt: end the prompt where the model's answer begins.
        continue_final_message: let the model continue the last message.
    """

    messages: list[dict[str, Any]]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False

    def params(self, default: SamplingParams) -> SamplingParams:
        """Return the sampling parameters; see `sampling_params`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs; set it to true")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        num_top = (self.top_logprobs or 0) if self.logprobs else None
        own: dict[str, Any] = {"max_tokens": most, "logprobs": num_top}
        if self.response_format is not None and (wanted := self.response_format.params()) is not None:
            if self.structured_outputs is not None:
                raise RequestError("response_format and structured_outputs exclude each other; give one of them")
            own["structured_outputs"] = wanted
        if (calls := self._forced_calls()) is not None:
            if self.structured_outputs is not None or "structured_outputs" in own:
                raise RequestError("a forced tool_choice and another structured output exclude each other")
            own["structured_outputs"] = StructuredOutputsParams(json=calls)
        return self.sampling_params(default, **own)

    @property
    def offers_tools(self) -> bool:
        """Whether the model may call a tool."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def is_forced(self) -> bool:
        """Whether the model must call a tool."""
        return self.offers_tools and self.tool_choice not in (None, "auto")

    @property
    def forced_name(self) -> str | None:
        """The function that the model must call; None if it may choose."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    def _forced_calls(self) -> dict[str, Any] | None:
        """Return the JSON schema of forced calls: of the arguments of the named function, or of a list of calls."""
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise RequestError("tool_choice needs tools; give them, or leave tool_choice out")
        if not self.is_forced:
            return None
        functions = {tool.function.name: tool.function for tool in self.tools or ()}
        schemas = {
            name: close_objects(own.parameters) if own.strict else own.parameters for name, own in functions.items()
        }
        if (name := self.forced_name) is not None:
            if name not in schemas:
                raise RequestError(f"tool_choice names {name!r}, which is not among the tools")
            return schemas[name]
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name, schema in schemas.items()
        ]
        most = {"maxItems": 1} if self.parallel_tool_calls is False else {}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages with their content as text, and with the arguments of tool calls as objects.

        Raises:
            RequestError: for a part that is not text.
        """
        texts = [
            message | {"content": as_text(message["content"])} if "content" in message else message
            for message in self.messages
        ]
        return [with_parsed_arguments(message) for message in texts]

    def template_options(self) -> dict[str, Any]:
        """Return the options of `TextEngine.chat_prompt`."""
        return {
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools or ()] if self.offers_tools else None,
        }


class TokenizeRequest(BaseModel):
    """`POST /tokenize`, as in vLLM: of a text, or of a conversation."""

    model_config = ConfigDict(extra="forbid")
    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`, as in vLLM."""

    model_config = ConfigDict(extra="forbid")
    model: StrictStr | None = None
    tokens: list[Annotated[StrictInt, Field(ge=0)]]


def as_text(content: Any) -> str | None:
    """Return a message's content as one text; None if it is missing.

    Raises:
        RequestError: if it is neither text nor a list of parts with text.
    """
    if content is None or isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError('the content of a message is text, or a list of {"type": "text", "text": ...}')
        texts.append(text)
    return "".join(texts)
