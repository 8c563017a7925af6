"""Turn tokens into text: all at once, or one at a time without half characters, with a search for stop strings."""

from collections.abc import Callable, Sequence
from copy import copy

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"  # the text of bytes that are not a character
MAX_PENDING = 64  # tokens whose text is not complete; the bytes of a character are at most 4
CONTEXT_TOKENS = 8  # of the prompt, decoded again before the output

ScanStop = Callable[[str, Sequence[str]], tuple[str, str, bool]]


def scan_stop(text: str, stop: Sequence[str]) -> tuple[str, str, bool]:
    """Split text at the first stop string, or before an ending that may become one.

    Args:
        text: text not yet shown.
        stop: stop strings, none empty.

    Returns:
        (safe, held, stopped): the text that can be shown now; the text that has to wait, because it is the beginning of
        a stop string; and whether a stop string was found, in which case nothing is held and what follows is dropped.
        If there are several, the first to be complete counts, or the longer of two that end together.
    """
    # Where each is complete and where it begins. The first to be complete counts, however the text was split.
    found = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    if found:
        return text[: min(found)[1]], "", True
    longest = max((len(s) for s in stop), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(s.startswith(text[start:]) for s in stop):
            return text[:start], text[start:], False
    return text, "", False


def context_of(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[int]:
    """Return the last tokens of a prompt; none if they end in half a character.

    Some tokenizers write a word without its space at the start of a text (Llama 2), so an output is decoded after the
    end of its prompt.
    """
    context = list(prompt_token_ids[-CONTEXT_TOKENS:])
    return [] if tokenizer.decode(context).endswith(REPLACEMENT) else context


def decode_after(
    tokenizer: Tokenizer, context: list[int], token_ids: list[int], skip_special_tokens: bool = True
) -> str:
    """Return the text of tokens that follow a context."""
    known = tokenizer.decode(context, skip_special_tokens=skip_special_tokens)
    text = tokenizer.decode(context + token_ids, skip_special_tokens=skip_special_tokens)
    if text.startswith(known):
        return text[len(known) :]
    return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)  # the tokens change the text before


class Detokenizer:
    """The growing text of one request, decoded by the `DecodeStream` of the tokenizers library.

    `DecodeStream` holds back incomplete characters. Bytes that never become one are shown as U+FFFD after
    `MAX_PENDING` tokens, so the work per token is bounded.

    Args:
        tokenizer: the model's.
        prompt_token_ids: the prompt, whose end decides whether the text begins with a space.
        hidden: special tokens to leave out; see `special_ids`.
        stop: strings that end the text.
        include_stop: whether the stop string is part of the text.
        min_tokens: the text of this many tokens is not searched for stop strings.
        scan_stop: finds stop strings.

    Attributes:
        text: the text that can be shown so far.
        num_tokens: tokens received.
        stopped: a stop string was found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        hidden: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        scan_stop: ScanStop = scan_stop,
    ) -> None:
        self.text, self.num_tokens, self.stopped = "", 0, False
        self._tokenizer, self._hidden = tokenizer, hidden
        self._context = [t for t in context_of(tokenizer, prompt_token_ids) if t not in hidden]
        self._stop, self._include_stop, self._scan_stop = stop, include_stop, scan_stop
        self._min_tokens = min_tokens
        self._stream = DecodeStream(ids=self._context)
        self._pending: list[int] = []  # tokens whose text is not complete
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token_id: int, *, is_shown: bool = True) -> str:
        """Add a token and return the text that can be shown now: possibly none, but never half a character.

        Args:
            token_id: the token.
            is_shown: False for a token that only counts, such as the end of the output.
        """
        if token_id in self._hidden or not is_shown:
            self.num_tokens += 1
            return ""
        stream, pending = copy(self._stream), [*self._pending, token_id]
        try:
            new, is_lost = stream.step(self._tokenizer, token_id), len(pending) == MAX_PENDING
        except Exception:  # the token changes text that has been shown
            new, is_lost = None, True
        if new is None and is_lost:
            new, stream = self._decode(pending), DecodeStream(ids=self._context)
        count = self.num_tokens + 1
        shown, held, stopped = self._scan(new or "", count)
        text = self.text + shown
        # Plain assignments, which Ctrl-C cannot separate: a token counts exactly if its text is kept.
        self._stream, self._pending, self._held = stream, pending if new is None else [], held
        self.text, self.num_tokens, self.stopped = text, count, stopped
        return shown

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        shown, held, stopped = self._scan(self._decode(self._pending), self.num_tokens)
        text = self.text + shown + held
        self._pending, self._held, self.stopped, self.text = [], "", stopped, text
        return shown + held

    def _decode(self, token_ids: list[int]) -> str:
        return decode_after(self._tokenizer, self._context, token_ids, skip_special_tokens=False)

    def _scan(self, new: str, num_tokens: int) -> tuple[str, str, bool]:
        if not self._stop or num_tokens <= self._min_tokens:
            return new, "", False
        text = self._held + new
        safe, held, stopped = self._scan_stop(text, self._stop)
        if stopped and self._include_stop:
            safe += min((s for s in self._stop if text.startswith(s, len(safe))), key=len, default="")
        return safe, held, stopped


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special tokens of a tokenizer, which have no text."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
