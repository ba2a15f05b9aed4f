"""Patterns: which keys a query may see, by their positions. Imports no torch."""

from typing import TYPE_CHECKING, Annotated, Literal

from anyformer.config.spec import BY_KIND, Count, Spec

if TYPE_CHECKING:
    from torch import Tensor


class Full(Spec):
    """Every key."""

    kind: Literal["full"] = "full"

    @property
    def looks_ahead(self) -> bool:
        return True

    def sees(self, q: "Tensor", k: "Tensor") -> "Tensor":
        return (q == q) & (k == k)


class Causal(Spec):
    """The past and oneself."""

    kind: Literal["causal"] = "causal"

    @property
    def looks_ahead(self) -> bool:
        return False

    def sees(self, q: "Tensor", k: "Tensor") -> "Tensor":
        return k <= q


class Window(Spec):
    """At most `before` keys back and `after` keys ahead: causal when `after` is 0."""

    kind: Literal["window"] = "window"
    before: Count
    after: Count

    @property
    def looks_ahead(self) -> bool:
        return self.after > 0

    def sees(self, q: "Tensor", k: "Tensor") -> "Tensor":
        return (q - k <= self.before) & (k - q <= self.after)


Pattern = Annotated[Full | Causal | Window, *BY_KIND]
"""`sees(q, k)` defines a pattern: whether a query at position q may read a key at position k (broadcast)."""
