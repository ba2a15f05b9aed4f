"""Base of position schemes: the points of a model at which a scheme acts, and the hooks of each. Imports no torch."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from anyformer.config.cost import Cost, Matrix
from anyformer.config.part import Part
from anyformer.config.spec import Fault

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Tables = Mapping[str, "Tensor"]


class Rotation(NamedTuple):
    """Cosines and sines of one forward pass, fp32, each [b or 1, 1, t, rotated]: two equal halves, one for each element
    of a pair."""

    cos: "Tensor"
    sin: "Tensor"  # negative in the first half


class Relative(NamedTuple):
    """Vectors of distances, and the one of each pair of tokens."""

    vectors: "Tensor"  # [n, d]
    rows: "Tensor"  # int [b or 1, t, s]: which of the vectors


class Heads(Protocol):
    """The attention layer that a scheme acts in: its sizes."""

    @property
    def heads(self) -> int: ...

    @property
    def groups(self) -> int: ...

    @property
    def bias(self) -> bool: ...

    def widths(self, width: int) -> tuple[int, int]: ...

    def input_matrices(self, d: int) -> Iterator[Matrix]: ...


class Position(Part):
    """Base of position schemes: hooks that change nothing."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        within = any(
            getattr(cls, hook) is not getattr(Position, hook) for hook in ("prepare", "score", "bias", "relative")
        )
        assert not (cls.embeds() and within), f"{cls.__name__} must act on embeddings or inside attention, not on both"

    @classmethod
    def embeds(cls) -> bool:
        """Return whether the scheme acts on the embeddings, rather than inside attention."""
        return cls.embed is not Position.embed

    @classmethod
    def reads_coordinates(cls) -> bool:
        """Return whether `prepare` takes time, row and column [b, t, 3] where a layout has them."""
        return False

    @classmethod
    def reads_content(cls) -> bool:
        """Return whether scores depend on distance and content together: no bias is the same for all texts."""
        return cls.relative is not Position.relative

    @classmethod
    def biases(cls) -> bool:
        """Return whether the scheme adds to the scores."""
        return cls.bias is not Position.bias or cls.score is not Position.score

    @classmethod
    def rotates(cls) -> bool:
        """Return whether the scheme changes queries and keys."""
        return cls.rotate is not Position.rotate

    @property
    def learns_scores(self) -> bool:
        """True if learned tables add to the scores."""
        return (self.biases() or self.reads_content()) and bool(self.tables(1, 1))

    @property
    def limit(self) -> int | None:
        """Number of positions, or None if there is no limit."""
        return None

    @property
    def per_layer(self) -> bool:
        """True if every layer has its own tables, rather than one set for the stack."""
        return False

    def attention(self) -> "Callable[..., nn.Module] | None":
        """Return the class of attention layers with this scheme; None: the usual one."""
        return None

    def matrices(self, attention: Heads, width: int) -> Iterator[Matrix]:
        """Yield the linear layers that the scheme adds to an attention layer."""
        yield from ()

    def cost(self, attention: Heads, width: int, b: int, t: int) -> Cost:
        """Return what the scheme adds to the cost of an attention layer, for t tokens in each of b rows."""
        return Cost()

    def faults(self, key_width: int) -> Iterator[Fault]:
        """Yield what makes this scheme unfit for a model with heads of this width."""
        yield from ()

    def tables(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the learned tables."""
        return {}

    def fill(self, name: str, table: "Tensor", std: float) -> None:
        """Initialise a table in place; `std` is the standard deviation of the model's initialisation."""
        table.normal_(std=std)

    def embed(self, x: "Tensor", positions: "Tensor", tables: Tables) -> "Tensor":
        """[b, t, d] embeddings and [b or 1, t] positions to [b, t, d]."""
        return x

    def prepare(self, positions: "Tensor", key_width: int) -> Rotation | None:
        """Return the tables for `rotate`, computed once per forward pass."""
        return None

    def rotate(self, x: "Tensor", rotation: Rotation) -> "Tensor":
        """[b, h, t, k] queries or new keys to the same."""
        return x

    def levels(self, heads: int, causal: bool, tables: Tables, device: "torch.device") -> "Tensor | None":
        """Return the tables for `score`, computed once per forward pass; `causal`: later keys are never seen."""
        return None

    def score(self, levels: "Tensor", head: "Tensor", q: "Tensor", k: "Tensor") -> "Tensor":
        """Return the bias of a head's score between a query and a key position (broadcast), in any precision."""
        raise NotImplementedError

    def bias(self, q: "Tensor", k: "Tensor", heads: int, causal: bool, tables: Tables) -> "Tensor | None":
        """Return all biases: [b or 1, t] query and [b or 1, s] key positions to [b or 1, h, t, s]."""
        import torch

        levels = self.levels(heads, causal, tables, q.device)
        if levels is None:
            return None
        head = torch.arange(heads, device=q.device)[:, None, None]
        return self.score(levels, head, q[:, None, :, None], k[:, None, None, :])

    def relative(self, q: "Tensor", k: "Tensor", tables: Tables) -> Relative | None:
        """Return a vector for each pair of [b or 1, t] query and [b or 1, s] key positions, which layers project."""
        return None
