"""Chat templates: Jinja programs that come with a model and turn a conversation into text."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mini_engine.chat_template_worker import CPU_SECONDS, MEMORY_BYTES
from mini_engine.errors import RequestError

Message = Mapping[str, str]
WORKER = Path(__file__).with_name("chat_template_worker.py")
WALL_SECONDS = 10  # far above CPU_SECONDS, so only an overloaded machine reaches it


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], chat_template: str | None) -> str:
    """Render a conversation up to where the model's next message begins.

    A template is a program written by the model's author. Jinja's sandbox denies it access to files and to Python's
    internals, but lets it loop forever or allocate a gigabyte with `'a' * 10**9`, and no check in this process can
    interrupt a long operation in C. So a separate process compiles and renders the template; starting it takes about
    0.1 s of processor time. The kernel limits that process to `CPU_SECONDS` of processor time and `MEMORY_BYTES` of
    address space. The process refuses to return more than `OUTPUT_CHARS` characters, and after `WALL_SECONDS` it is
    killed.

    Args:
        tokenizer: provides the special tokens and the default template.
        messages: each with a "role" and a "content".
        chat_template: a Jinja template, or the name of one of the tokenizer's; default the tokenizer's own.

    Returns:
        The text of `tokenizer.apply_chat_template` with `tokenize=False, add_generation_prompt=True`.

    Raises:
        RequestError: if there is no template, if the messages are malformed, or if the template refuses them, fails,
            renders nothing or exceeds a limit.
    """
    variables = {
        **tokenizer.special_tokens_map,
        "messages": _check_messages(messages),
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    request = json.dumps({"template": _pick_template(tokenizer, chat_template), "variables": variables})
    # -P keeps this folder out of the worker's import path, because a module here could shadow a standard one.
    command = [sys.executable, "-P", "-W", "ignore", str(WORKER)]
    try:
        worker = subprocess.run(command, input=request.encode(), capture_output=True, timeout=WALL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"the chat template did not finish in {WALL_SECONDS} s; use a simpler one") from error
    except OSError as error:
        raise RequestError(
            f"cannot start a process for the chat template: {error}; free memory or end other processes"
        ) from error
    if worker.returncode:
        cause = worker.stderr.decode(errors="replace").splitlines()[-1:] or [f"exit code {worker.returncode}"]
        raise RequestError(
            f"the chat template was stopped ({cause[0]}): it may use {CPU_SECONDS} s of CPU time and "
            f"{MEMORY_BYTES >> 20} MiB of memory; use a simpler template or shorter messages"
        )
    answer = json.loads(worker.stdout)
    if "error" in answer:
        raise RequestError(f"the chat template rejects these messages: {answer['error']}; change them or the template")
    return answer["text"]


def _check_messages(messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"messages is {str(messages)[:100]!r}; pass a list of one or more messages")
    for message in messages:
        if (
            not isinstance(message, Mapping)
            or not {"role", "content"} <= message.keys()
            or not all(isinstance(text, str) for item in message.items() for text in item)
        ):
            raise RequestError(
                f"{str(message)[:100]} is not a message; pass mappings of strings with a 'role' and a 'content'"
            )
    return [_with_reasoning(message) for message in messages]


def _with_reasoning(message: Message) -> dict[str, str]:
    """Give the model's reasoning, whatever its name is, the names that templates read, as transformers does."""
    found = [message[name] for name in ("reasoning_content", "thinking", "reasoning") if name in message]
    return {"thinking": found[0], **message, "reasoning_content": found[0]} if found else dict(message)


def _pick_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> str:
    try:
        template = tokenizer.get_chat_template(chat_template)
    except (TypeError, ValueError):  # none, several without a default, or an argument that cannot be a name
        template = None
    if not template or not isinstance(template, str):
        found = f", but {str(template)[:100]!r}" if template else ""
        raise RequestError(
            f"there is no chat template to use{found}; pass the text of a Jinja template, or generate from plain text"
        )
    return template
