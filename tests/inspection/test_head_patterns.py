"""Statistics and names of heads, figures, and maps in the terminal."""

from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from torch import Tensor

from anyformer.config import LM, Alibi, Attention, Block, ModelConfig, Rotary, Stack, Tokens
from anyformer.nn.inspection import plot
from anyformer.nn.inspection.ablation import head_scores, logit
from anyformer.nn.inspection.attention_maps import attention_maps
from anyformer.nn.inspection.attribution import attribute
from anyformer.nn.inspection.cache_growth import cache_growth
from anyformer.nn.inspection.head_patterns import head_statistics
from anyformer.nn.inspection.logit_terms import logit_lens
from anyformer.nn.inspection.score_terms import position_curves, score_terms
from anyformer.nn.inspection.terminal_maps import fitted, map_lines, strongest
from tests.strategies import build, close, tokens

T = 8
WORDS = ["나는", "학교에", "我去学校", "<eos>", "▁", "a$b$", "naïve", "…"]


def one_hot(*keys: int) -> Tensor:
    """Return a map [t, t] in which each query attends to one key."""
    return torch.eye(T)[list(keys)]


def soft(causal: bool = True) -> Tensor:
    """Return a map with equal weights on all visible keys."""
    weights = torch.ones(T, T).tril() if causal else torch.ones(T, T)
    return weights / weights.sum(dim=-1, keepdim=True)


def maps_of(*heads: Tensor, batch: int = 1) -> Tensor:
    return torch.stack(heads)[None, None].expand(1, batch, -1, -1, -1)


IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8]])
PREVIOUS = one_hot(0, 0, 1, 2, 3, 4, 5, 6)
INDUCTION = one_hot(0, 0, 0, 0, 1, 2, 3, 4)  # the token after the one that was the same
SECOND = one_hot(0, 1, 1, 1, 1, 1, 1, 1)


# -- statistics -----------------------------------------------------------------------------------------------------


def test_names_of_heads():
    """Each named pattern in its purest form, with a uniform head so that every key is visible."""
    heads = maps_of(PREVIOUS, one_hot(*range(T)), INDUCTION, one_hot(*[0] * T), SECOND, soft())
    found = head_statistics(heads, IDS)
    names = ["previous token", "itself", "induction", "first token", "vertical", "diffuse"]
    assert found.names() == [names]
    assert float(found.previous[0, 0]) == float(found.itself[0, 1]) == float(found.induction[0, 2]) == 1.0
    assert found.entropy[0, :5].tolist() == [0.0] * 5
    close(found.spread[0, 5], torch.tensor(1.0), 1e-6)
    close(found.distance[0, :2], torch.tensor([1.0, 0.0]))
    ahead = head_statistics(maps_of(one_hot(1, 2, 3, 4, 5, 6, 7, 7), soft(causal=False)), IDS)
    assert ahead.names() == [["next token", "diffuse"]]


def test_a_share_is_over_the_queries_that_have_such_a_key():
    """Half of the weight is on the previous token, for all queries but the first, which has none."""
    half = (PREVIOUS + one_hot(*range(T))) / 2
    found = head_statistics(maps_of(half, soft()), IDS)
    assert float(found.previous[0, 0]) == float(found.itself[0, 0]) == 0.5
    found = head_statistics(maps_of(INDUCTION, soft()), torch.arange(T)[None])
    assert found.induction.isnan().all()  # no token came twice
    once = torch.tensor([[5, 6, 7, 8, 5, 1, 2, 3]])
    assert head_statistics(maps_of(INDUCTION, soft()), once).induction.isnan().all()  # one did, which shows nothing


def test_a_positional_head_has_the_same_map_for_other_tokens():
    far = one_hot(0, 0, 0, 0, 1, 2, 3, 4)
    other = one_hot(0, 1, 0, 2, 0, 5, 1, 7)
    same = head_statistics(maps_of(far, soft(), batch=3))
    assert same.positional.tolist() == [[1.0, 1.0]]
    assert same.names() == [["positional", "diffuse"]]
    apart = torch.stack([maps_of(far, soft())[:, 0], maps_of(other, soft())[:, 0]], dim=1)
    found = head_statistics(apart)
    assert float(found.positional[0, 0]) < 0.5
    assert found.names()[0][0] == "mixed"
    assert head_statistics(maps_of(far, soft())).positional.isnan().all()  # nothing to compare with


def test_padding_does_not_count_and_cross_attention_has_no_distance():
    real = torch.arange(T)[None] < 5
    broken = torch.cat((PREVIOUS[:5], one_hot(*[0] * T)[5:]))
    found = head_statistics(maps_of(broken, soft()), IDS, real=real)
    assert float(found.previous[0, 0]) == 1.0
    across = head_statistics(maps_of(PREVIOUS, soft(causal=False)), cross=True)
    assert across.distance.isnan().all()
    assert across.previous.isnan().all()
    assert across.names() == [["mixed", "diffuse"]]


# -- figures --------------------------------------------------------------------------------------------------------


def test_every_figure_takes_any_token(tmp_path: Path):
    """Korean, Chinese and dollar signs; characters that no font has become boxes, not errors."""
    pytest.importorskip("matplotlib")
    block, read = Block(mixer=Attention(heads=2)), Tokens(vocab=8)
    stack = Stack(depth=2, blocks=(block, Block(mixer=Attention(heads=2, position=Rotary()))), position=Alibi())
    model, ids = build(ModelConfig(width=8, target=read, decoder=stack, head=LM())), tokens(0, 1, T) % 8
    maps, title = attention_maps(model, ids)["decoder"], "$나$ 我"
    attribution = attribute(model, logit(3), ids)

    def at(name: str) -> Path:
        return tmp_path / f"{name}.svg"

    drawn = [
        plot.plot_map(maps[:, 0], WORDS, WORDS, at("maps"), title),
        plot.plot_map(maps[0, 0, 0], WORDS, WORDS, at("map"), title),
        plot.plot_head_scores(head_scores(model, logit(3), ids), at("scores"), title),
        plot.plot_lens(logit_lens(model, ids)[:, 0], WORDS, WORDS, at("lens")),
        plot.plot_statistics(head_statistics(maps, ids), at("statistics"), title),
        plot.plot_terms(score_terms(model, "decoder.0.mixer", ids), at("terms")),
        plot.plot_curves(position_curves(model), at("curves")),
        plot.plot_attribution(attribution, {"decoder": WORDS}, at("attribution")),
        plot.plot_growth({"auto": cache_growth(model, 4), "int8": cache_growth(model, 4, kind="int8")}, at("growth")),
    ]
    texts = [path.read_text(encoding="utf-8") for path in drawn]
    assert all(text.startswith("<?xml") for text in texts)
    assert all("학교에" in texts[i] for i in (0, 1, 3, 7))  # text stays text, for the reader's own fonts


def test_a_map_of_many_tokens_stays_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The size of the figure and the number of labels are limited."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plot, "MAX_INCHES", 6.0)
    monkeypatch.setattr(plot, "MAX_LABELS", 10)
    names = [f"{i}나" for i in range(64)]
    path = plot.plot_map(torch.rand(2, 64, 64), names, names, tmp_path / "map.png")
    assert 130 * 6 <= int.from_bytes(path.read_bytes()[16:20], "big") <= 130 * 8


# -- the terminal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [30, 80, 200])
def test_wide_tokens_line_up(width: int):
    """All lines of a block have the same width, at most `width` cells, and no value is lost."""
    weights = soft()
    lines = [line.plain for line in map_lines(weights, WORDS, WORDS, width)]
    blocks = "\n".join(lines).split("\n\n")
    for block in blocks:
        lengths = {cell_len(line) for line in block.split("\n")}
        assert len(lengths) == 1
        assert max(lengths) <= width
        assert len(block.split("\n")) == T + 2
    last = [block.split("\n")[-1][2:] for block in blocks]
    assert sum(line.count("12") for line in last) == T  # an eighth each
    assert "".join(lines).count("나는") == 1 + len(blocks)


def test_tokens_that_are_too_long():
    assert fitted("학교에간다", 6) == "학교… "
    assert fitted("ab", 4, right=True) == "  ab"
    for token in (*WORDS, "x" * 30, "한" * 30):
        for width in range(2, 12):
            assert cell_len(fitted(token, width)) == cell_len(fitted(token, width, right=True)) == width


def test_colours_differ_by_weight():
    cells = [list(map_lines(torch.tensor([[w, 1 - w]]), ["a"], ["b", "c"]))[-1] for w in (0.0, 0.2, 0.5, 0.99)]
    styles = [str(line.spans[-2].style) for line in cells]
    assert len(set(styles)) == 4


def test_the_strongest_links():
    """In descending order, with their layers and heads, without queries that see only one key."""
    maps = torch.stack([soft(), soft()])[None].clone()
    maps[0, 1, 5] = one_hot(*[2] * T)[0] * 0.9 + 0.0125 * (torch.arange(T) < 8)
    first, *rest = strongest(maps, [3], [0, 7], most=4)
    assert first[1:] == (3, 7, 5, 2)
    assert first.weight == pytest.approx(0.9125)
    assert len(rest) == 3
    assert all(link.query != 0 for link in rest)
    assert [link.weight for link in rest] == sorted((link.weight for link in rest), reverse=True)
