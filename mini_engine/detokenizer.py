"""From tokens to text, one token at a time: no half characters, and stop strings that straddle tokens."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Tokens without text after which the next ones can only be bytes of no character: a UTF-8 character has at most four.
MAX_PENDING = 8


def scan_stop(text: str, stop: Sequence[str]) -> tuple[str, str, bool]:
    """Split text at the first stop string, or before an ending that may become one.

    Args:
        text: text not yet shown.
        stop: stop strings, none empty.

    Returns:
        (safe, held, stopped): the text that can be shown now; the text that has to wait, because it is the beginning of
        a stop string; and whether a stop string was found, in which case nothing is held and what follows is dropped.
        Of several, the one that is complete first counts, and the longer of two that end together.
    """
    # Where each is complete and where it begins. The one that is complete first counts, however the text was cut.
    found = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    if found:
        return text[: min(found)[1]], "", True
    longest = max((len(s) for s in stop), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(s.startswith(text[start:]) for s in stop):
            return text[:start], text[start:], False
    return text, "", False


class Detokenizer:
    """The text of one request, growing with its tokens.

    The work per token is bounded, whatever the tokens are: special tokens, which show nothing, are left out, and bytes
    that do not become a character are shown as U+FFFD after a few tokens.

    Args:
        tokenizer: the model's.
        special_ids: its special tokens.
        stop: strings that end the text.

    Attributes:
        text: the text that can be shown so far.
        stopped: a stop string was found; `text` ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int], stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer, self._special_ids, self._stop = tokenizer, special_ids, stop
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []  # tokens whose text is not complete
        self._held = ""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that can be shown now: possibly nothing, never half a character."""
        if token_id in self._special_ids:
            return ""
        self._pending.append(token_id)
        text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            if len(self._pending) < MAX_PENDING:
                return ""
            text = self._tokenizer.decode(self._pending)
            self._stream = DecodeStream(ids=self._pending, skip_special_tokens=True)
        self._pending = []
        return self._show(text)

    def finish(self) -> str:
        """Return the text that was held back: no more tokens come."""
        shown = self._show(self._tokenizer.decode(self._pending)) + self._held
        self._pending = []
        self.text += self._held
        self._held = ""
        return shown

    def _show(self, new: str) -> str:
        safe, self._held, self.stopped = scan_stop(self._held + new, self._stop)
        self.text += safe
        return safe


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens of a tokenizer that stand for no text."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
