"""Chat templates: Jinja programs that come with a model and turn a conversation into text."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from mini_engine.chat_template_worker import CPU_SECONDS, MEMORY_BYTES, render
from mini_engine.errors import RequestError

Message = Mapping[str, Any]
WORKER = Path(__file__).with_name("chat_template_worker.py")


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    chat_template: str | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    is_trusted: bool = True,
) -> str:
    """Render a conversation as `tokenizer.apply_chat_template` of transformers does.

    Both use Jinja's sandbox, which denies a template access to files and to Python's internals, and compile each
    template once. The sandbox does not stop a template that loops forever or allocates gigabytes, so one that nobody
    has vouched for is rendered by a second process under limits, which is started once.

    Args:
        tokenizer: provides the special tokens and the default template.
        messages: each with a "role"; its other values are the template's business.
        chat_template: a Jinja template, or the name of one of the tokenizer's; default the tokenizer's own.
        add_generation_prompt: end where the model's next message begins.
        continue_final_message: leave the last message open, so that the model continues it.
        tools: functions that the model may call: JSON schemas, or Python functions with a docstring.
        chat_template_kwargs: further variables of the template, such as `enable_thinking`.
        is_trusted: render in this process.

    Raises:
        RequestError: if there is no template, if the messages are malformed, or if the template refuses them, fails,
            renders nothing or exceeds a limit.
    """
    is_chat = isinstance(messages, Sequence) and all(isinstance(m, Mapping) and "role" in m for m in messages)
    if not is_chat or not messages:
        raise RequestError(f"messages is {str(messages)[:100]!r}; pass a list of mappings with 'role' and 'content'")
    if add_generation_prompt and continue_final_message:
        raise RequestError("a new message cannot begin and the last one go on: set add_generation_prompt=False")
    if not (chat_template or tokenizer.chat_template):
        raise RequestError("there is no chat template to use: pass a Jinja template, or generate from plain text")
    try:
        schemas: Any = tools and [tool if isinstance(tool, Mapping) else get_json_schema(tool) for tool in tools]
        request = {
            **tokenizer.special_tokens_map,
            **(chat_template_kwargs or {}),
            # As in transformers: most templates take a missing value, but not a null.
            "conversations": [[{k: v for k, v in message.items() if v is not None} for message in messages]],
            "tools": schemas,
            "chat_template": tokenizer.get_chat_template(chat_template, schemas),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        text, problem = render(request) if is_trusted else _worker(os.getpid()).render(request)
    except Exception as error:  # a tool may raise anything
        text, problem = "", f"{type(error).__name__}: {str(error)[:500]}"
    if not text:
        raise RequestError(f"the chat template rejects these messages: {problem}; change them or the template")
    return text


class _Worker:
    """The process that renders templates under limits, started when it is first needed and after it was stopped."""

    def __init__(self) -> None:
        self._process: Any = None
        self._lock = Lock()

    def render(self, request: dict[str, Any]) -> Sequence[str]:
        """Return the text and "", or "" and the problem."""
        line, answer = json.dumps(request), ""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                # -P keeps this folder out of the import path, because a module here could shadow a standard one.
                command, env = [sys.executable, "-P", str(WORKER)], os.environ | {"USE_TORCH": "0"}  # starts faster
                self._process = Popen(
                    command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, env=env, start_new_session=True
                )
            try:
                print(line, file=self._process.stdin, flush=True)
                answer = self._process.stdout.readline()
            finally:
                if not answer:  # it exceeded a limit; or after Ctrl-C, whose answer must not be taken for the next one
                    self._process.kill()
                    self._process.wait()
        limits = f"{CPU_SECONDS} s of CPU time and {MEMORY_BYTES >> 20} MiB of memory"
        return json.loads(answer) if answer else ("", f"it was stopped because it may use {limits}")


_worker = cache(lambda process_id: _Worker())  # a process that was forked needs its own
