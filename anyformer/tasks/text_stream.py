"""Ids that come one after the other, as pieces of text: never half a character, and nothing of a stop string."""

from collections.abc import Sequence

from anyformer.data.tokenizer import TextTokenizer

SPOILT = -1  # in the place of a token whose logits were no distribution
HALF = "\ufffd"  # what bytes become that are no whole character, or not yet


class Unfolding:
    """The text of ids that follow others: `"".join(pieces) == decode(before + ids)` without `decode(before)`.

    Tokens mean what they mean beside those before them: a first word has no space before it, later ones have. So new
    ones are decoded together with the last that made whole characters, and no others: the work does not grow.
    """

    def __init__(self, tokenizer: TextTokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = list(before)  # from where characters are whole
        self._whole = len(self._ids)  # of them, up to where characters are whole again
        self._text = tokenizer.decode(self._ids)
        self._shown = len(self._text)

    def push(self, ids: Sequence[int]) -> str:
        """What is certain of the text now that was not before."""
        self._ids += ids
        self._text = self._tokenizer.decode(self._ids)
        certain = len(self._text) - self._text.endswith(HALF)
        piece, shown = self._text[self._shown : certain], self._shown
        self._shown = max(shown, certain)
        if shown < certain == len(self._text):
            self._ids, self._whole = self._ids[self._whole :], len(self._ids) - self._whole
            self._text = self._tokenizer.decode(self._ids)
            self._shown = len(self._text)
        return piece

    def rest(self) -> str:
        """What is left when nothing follows."""
        piece, self._shown = self._text[self._shown :], len(self._text)
        return piece


class Stops:
    """Text up to where one of some strings is first complete, without that string, however the text is cut into pieces.

    What could be the beginning of a stop string is held back until that is known.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings, self._held = tuple(strings), ""
        self.found = False

    def push(self, piece: str) -> str:
        if self.found:
            return ""
        text = self._held + piece
        places = [(text.find(string), len(string)) for string in self._strings]
        ends = [(at + length, at) for at, length in places if at >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        kept = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def rest(self) -> str:
        """What was held back, when nothing follows."""
        piece, self._held = self._held, ""
        return piece


class Writing:
    """An answer that is being said."""

    def __init__(self, room: int, stop_ids: Sequence[int], text: Unfolding, stops: Stops):
        self.room, self.stop_ids, self.text, self.stops = room, stop_ids, text, stops
        self.ids: list[int] = []
        self.ended, self.spoilt = room == 0, False
        self._said: list[str] = []

    def push(self, ids: Sequence[int]) -> str:
        """The text that some more tokens add; of those behind the end, none."""
        said: list[int] = []
        for id in ids:
            if self.ended:
                break
            self.spoilt = id == SPOILT
            self.room -= 1
            self.ended = self.spoilt or id in self.stop_ids or self.room == 0
            said += [] if self.spoilt or id in self.stop_ids else [id]
        self.ids += said
        piece = self.stops.push(self.text.push(said)) if said else ""
        self.ended |= self.stops.found
        self._said.append(piece)
        return piece

    def rest(self) -> str:
        """What was held back."""
        return "" if self.stops.found else self.stops.push(self.text.rest()) + self.stops.rest()

    def whole(self) -> str:
        """All of the answer, when nothing follows."""
        return "".join([*self._said, self.rest()])


def _overlap(text: str, string: str) -> int:
    """How much of the end of a text is the beginning of a string that may follow."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
