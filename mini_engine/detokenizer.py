"""Turn tokens into text one at a time, without half characters, and find stop strings that span tokens."""

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # the text of bytes that are not a character
MAX_BYTES = 4  # per character in UTF-8
MAX_PENDING = 2 * MAX_BYTES  # tokens whose text is not complete

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


class Detokenizer:
    """The growing text of one request.

    The work per token is bounded, whatever the tokens are: special tokens are left out, because they have no text, and
    bytes that do not become a character are shown as U+FFFD after a few tokens. The text is the same as if all tokens
    were decoded at once, except where a tokenizer would change text that has been shown.

    Args:
        tokenizer: the model's.
        special_ids: its special tokens.
        stop: strings that end the text.
        scan_stop: finds them.

    Attributes:
        text: the text that can be shown so far.
        stopped: a stop string was found; `text` ends before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_ids: frozenset[int],
        stop: Sequence[str] = (),
        scan_stop: ScanStop = scan_stop,
    ) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer, self._special_ids = tokenizer, special_ids
        self._stop, self._scan_stop = stop, scan_stop
        # The last tokens that were shown, and their text. They are decoded again with the next ones, because some
        # tokenizers write a word differently at the start of a text.
        self._context: list[int] = []
        self._known = ""
        self._pending: list[int] = []  # tokens whose text is not complete
        self._held = ""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that can be shown now: possibly none, but never half a character."""
        if token_id in self._special_ids:
            return ""
        pending = [*self._pending, token_id]
        text = self._decode(pending)
        count = len(pending) if text and not text.endswith(REPLACEMENT) else 0
        if count == 0 and len(pending) == MAX_PENDING:
            count, text = self._split(pending, text)
        if count and text:
            self._known, self._context = self._tokenizer.decode(pending[:count]), pending[:count]
        self._pending = pending[count:]
        return self._show(text) if count else ""

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        shown = self._show(self._decode(self._pending)) + self._held
        self._pending = []
        self.text += self._held
        self._held = ""
        return shown

    def _decode(self, token_ids: list[int]) -> str:
        """Decode tokens that follow the context."""
        text = self._tokenizer.decode(self._context + token_ids)
        if text.startswith(self._known):
            return text[len(self._known) :]
        return self._tokenizer.decode(token_ids)  # these tokens change the text before them, which has been shown

    def _split(self, pending: list[int], text: str) -> tuple[int, str]:
        """Return how many pending tokens can be shown, and their text; the last ones may begin a character."""
        for count in range(MAX_PENDING - MAX_BYTES + 1, 0, -1):
            head = self._decode(pending[:count])
            if text.startswith(head):  # otherwise a character is incomplete
                return count, head
        return MAX_PENDING, text

    def _show(self, new: str) -> str:
        if self._stop:
            new, self._held, self.stopped = self._scan_stop(self._held + new, self._stop)
        self.text += new
        return new


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens of a tokenizer that have no text."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
