"""From tokens to text, one token at a time: no half characters, and stop strings that straddle tokens."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character


def scan_stop(text: str, stop: Sequence[str]) -> tuple[str, str, bool]:
    """Split text at the first stop string, or before an ending that may become one.

    Args:
        text: text not yet shown.
        stop: stop strings, none empty.

    Returns:
        (safe, held, stopped): what can be shown now; what has to wait, since it is the beginning of a stop string;
        and whether a stop string was found, in which case nothing is held and what follows is dropped. Of several,
        the one that is complete first counts, and the longer of two that end together.
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

    Attributes:
        text: what can be shown so far.
        stopped: a stop string was found; `text` ends before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._held = ""
        # Tokens whose text is known, and after them those whose text is not yet complete. A few known ones are
        # decoded again with the new ones: some tokenizers write a word differently at the start of a text.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token and return the text that can be shown now: possibly nothing, never half a character."""
        self._pending.append(token_id)
        known = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT):
            return ""
        # A special token shows nothing. Alone it would make the next word the first one of a text.
        self._context = self._pending if text != known else self._context + self._pending
        self._pending = []
        return self._show(text[len(known) :])

    def finish(self) -> str:
        """Return what was held back: no more tokens come."""
        text = self._decode(self._context + self._pending)[len(self._decode(self._context)) :]
        self._pending = []
        shown = self._show(text) + self._held
        self.text += self._held
        self._held = ""
        return shown

    def _show(self, new: str) -> str:
        safe, self._held, self.stopped = scan_stop(self._held + new, self._stop)
        self.text += safe
        return safe

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list would come of a batch
        return text
