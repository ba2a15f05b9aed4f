"""Statistics of attention heads, and a name for the pattern of each."""

from dataclasses import dataclass

import torch
from torch import Tensor

# (name, statistic, threshold): a head has the first name whose statistic reaches the threshold.
PATTERNS = (
    ("previous token", "previous", 0.5),
    ("next token", "next", 0.5),
    ("itself", "itself", 0.5),
    ("induction", "induction", 0.5),
    ("first token", "first", 0.5),
    ("vertical", "vertical", 0.5),
    ("diffuse", "spread", 0.9),
    ("positional", "positional", 0.9),
)
OTHER = "mixed"
MIN_INDUCTION_QUERIES = 4  # queries that must have such a key: a single repeated token shows nothing


@dataclass(frozen=True)
class HeadStatistics:
    """Statistics [layers, heads] over the queries that can see more than one key; NaN where undefined.

    A share is the mean weight on one kind of key, over the queries that have such a key.
    """

    entropy: Tensor  # of the weights, in nats
    spread: Tensor  # entropy divided by that of equal weights on all visible keys: 0 to 1
    distance: Tensor  # weighted mean, in tokens
    itself: Tensor  # share on the query's own position
    previous: Tensor  # on the token before it
    next: Tensor  # on the token after it
    first: Tensor  # on the first token
    induction: Tensor  # on tokens after earlier occurrences of the query's token; NaN if few queries have any
    vertical: Tensor  # highest mean weight on one key, among the keys that at least half of the queries see
    positional: Tensor  # overlap of the maps of different texts (neighbouring rows of the batch)

    def names(self) -> list[list[str]]:
        """Return the name of each head, by layer: see PATTERNS."""
        layers, heads = self.entropy.shape
        return [[self._name(layer, head) for head in range(heads)] for layer in range(layers)]

    def _name(self, layer: int, head: int) -> str:
        names = (name for name, share, least in PATTERNS if float(getattr(self, share)[layer, head]) >= least)
        return next(names, OTHER)


@torch.no_grad()
def head_statistics(
    maps: Tensor, ids: Tensor | None = None, *, real: Tensor | None = None, cross: bool = False
) -> HeadStatistics:
    """Return the statistics of maps [layers, b, heads, t, s] from `attention_maps`, for tokens `ids` [b, t].

    `real`, bool [b, t], selects the queries that count; None counts all. In cross-attention (`cross`) queries and keys
    belong to two texts, so statistics of distance are NaN.
    """
    maps = maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps
    t, s = maps.shape[-2:]
    visible = (maps > 0).any(dim=2).any(dim=0)  # [b, t, s]: by any head
    rows = visible.sum(dim=-1) > 1
    rows = rows if real is None else rows & real
    apart = torch.arange(t, device=maps.device)[:, None] - torch.arange(s, device=maps.device)  # [t, s]: query - key
    nothing = torch.full_like(maps[:, 0, :, 0, 0], torch.nan)

    def mean(values: Tensor, where: Tensor) -> Tensor:
        """Return the mean of values [layers, b, h, t] over the queries where [b, t] is true."""
        total = torch.where(where[None, :, None], values, 0.0).sum(dim=(1, 3))
        return total / where.sum() if bool(where.any()) else nothing

    def share(keys: Tensor, least: int = 1) -> Tensor:
        keys = keys.expand(len(rows), t, s) & visible
        where = rows & keys.any(dim=-1)
        return mean((maps * keys[None, :, None]).sum(dim=-1), where) if int(where.sum()) >= least else nothing

    within = not cross and t == s
    entropy = torch.special.entr(maps).sum(dim=-1)
    most = visible.sum(dim=-1).clamp(min=2).to(maps.dtype).log()[None, :, None]
    followed = None
    if within and ids is not None:
        same = ids[:, :, None] == ids[:, None, :]  # [b, t, s]
        followed = torch.roll(same, 1, dims=-1) & (apart >= 0) & (torch.arange(s, device=maps.device) > 0)
    return HeadStatistics(
        entropy=mean(entropy, rows),
        spread=mean(entropy / most, rows),
        distance=mean((maps * apart.abs()).sum(dim=-1), rows) if within else nothing,
        itself=share(apart == 0) if within else nothing,
        previous=share(apart == 1) if within else nothing,
        next=share(apart == -1) if within else nothing,
        first=share((torch.arange(s, device=maps.device) == 0).expand(t, s)),
        induction=nothing if followed is None else share(followed, MIN_INDUCTION_QUERIES),
        vertical=_vertical(maps, visible, rows),
        positional=mean(torch.minimum(maps, maps.roll(1, dims=1)).sum(dim=-1), rows & rows.roll(1, dims=0))
        if len(rows) > 1
        else nothing,
    )


def _vertical(maps: Tensor, visible: Tensor, rows: Tensor) -> Tensor:
    """Return the highest mean weight on one key, over the queries that see it if these are at least half; text mean."""
    seen = visible & rows[..., None]
    count = seen.sum(dim=1)  # [b, s]
    column = (maps * seen[None, :, None]).sum(dim=-2) / count.clamp(min=1)[None, :, None]  # [layers, b, h, s]
    often = 2 * count >= rows.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(often[None, :, None], column, 0.0).amax(dim=-1).mean(dim=1)
