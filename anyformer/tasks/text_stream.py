"""Incremental detokenization: text from ids that arrive one by one, in whole characters and without stop strings."""

from collections.abc import Sequence

from anyformer.data.tokenizer import TextTokenizer

NONFINITE = -1  # replaces a token whose logits were not finite
REPLACEMENT = "\ufffd"  # decoded from bytes that are not a whole character, or not yet


class IncrementalDecoder:
    """The text of ids that follow others: `"".join(pieces) == decode(before + ids)` without `decode(before)`.

    A token's text depends on the token before: a first word has no space before it, later ones have. So new tokens are
    decoded together with the last ones that made whole characters. The work per token is constant.
    """

    def __init__(self, tokenizer: TextTokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = list(before)  # begins at a whole character
        self._whole = len(self._ids)  # how many of them end with a whole character
        self._text = tokenizer.decode(self._ids)
        self._shown = len(self._text)

    def push(self, ids: Sequence[int]) -> str:
        """Add ids and return the text that became certain."""
        self._ids += ids
        self._text = self._tokenizer.decode(self._ids)
        certain = len(self._text) - self._text.endswith(REPLACEMENT)
        piece, shown = self._text[self._shown : certain], self._shown
        self._shown = max(shown, certain)
        if shown < certain == len(self._text):
            self._ids, self._whole = self._ids[self._whole :], len(self._ids) - self._whole
            self._text = self._tokenizer.decode(self._ids)
            self._shown = len(self._text)
        return piece

    def rest(self) -> str:
        """Return the remaining text when no ids follow."""
        piece, self._shown = self._text[self._shown :], len(self._text)
        return piece


class StopStrings:
    """Text up to the first complete stop string, without it, however the text is cut into pieces.

    A possible beginning of a stop string is held back until it is decided.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings, self._held = tuple(strings), ""
        self.found = False

    def push(self, piece: str) -> str:
        if self.found:
            return ""
        text = self._held + piece
        matches = [(text.find(string), len(string)) for string in self._strings]
        ends = [(at + length, at) for at, length in matches if at >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        overlap = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - overlap :]
        return text[: len(text) - overlap]

    def rest(self) -> str:
        """Return the text that was held back, when no more follows."""
        piece, self._held = self._held, ""
        return piece


class AnswerText:
    """The text of one answer, up to its end: a stop id, a stop string or its budget."""

    def __init__(self, budget: int, stop_ids: Sequence[int], text: IncrementalDecoder, stops: StopStrings):
        self.budget, self.stop_ids, self.text, self.stops = budget, stop_ids, text, stops
        self.ids: list[int] = []
        self.ended, self.nonfinite = budget == 0, False
        self._cut = False  # the last token that the budget allows is not a stop id
        self._pieces: list[str] = []

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the new text; tokens after the end are ignored."""
        new: list[int] = []
        for id in ids:
            if self.ended:
                break
            self.nonfinite = id == NONFINITE
            self.budget -= 1
            self._cut = self.budget == 0 and not self.nonfinite and id not in self.stop_ids
            self.ended = self.nonfinite or id in self.stop_ids or self.budget == 0
            new += [] if self.nonfinite or id in self.stop_ids else [id]
        self.ids += new
        piece = self.stops.push(self.text.push(new)) if new else ""
        self.ended |= self.stops.found
        self._pieces.append(piece)
        return piece

    @property
    def limited(self) -> bool:
        """True if the budget ended the answer."""
        return self._cut and not self.stops.found

    def rest(self) -> str:
        """Return the text that was held back."""
        return "" if self.stops.found else self.stops.push(self.text.rest()) + self.stops.rest()

    def whole(self) -> str:
        """Return the whole answer, when no tokens follow."""
        return "".join([*self._pieces, self.rest()])


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest end of a text that begins a string."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
