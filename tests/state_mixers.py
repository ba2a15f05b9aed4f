"""Random small mixers with a matrix state, for the laws."""

from hypothesis import strategies as st

from anyformer.config import ChannelDecay, GatedDelta, LayerNorm, LinearAttention, Mamba2, NoDecay, NoNorm, RMSNorm


@st.composite
def linear_attentions(draw: st.DrawFn) -> LinearAttention:
    """Plain, gated, and between."""
    features = draw(st.sampled_from(["elu", "none"]))
    return LinearAttention(
        heads=draw(st.sampled_from([1, 2, 4])),
        key_width=draw(st.sampled_from([None, 3])),
        value_width=draw(st.sampled_from([None, 5])),
        features=features,
        normalizer=draw(st.sampled_from(["sum", "none"])) if features == "elu" else "none",
        decay=draw(st.sampled_from([NoDecay(), ChannelDecay(rank=2, temperature=2.0)])),
        convolution=draw(st.integers(0, 3)),
        norm=draw(st.sampled_from([NoNorm(), RMSNorm(), LayerNorm()])),
        gate=draw(st.booleans()),
    )


@st.composite
def gated_deltas(draw: st.DrawFn) -> GatedDelta:
    heads = draw(st.sampled_from([1, 2, 4]))
    return GatedDelta(
        heads=heads,
        key_heads=draw(st.sampled_from([None, 1, heads])),
        key_width=draw(st.sampled_from([None, 3])),
        value_width=draw(st.sampled_from([None, 5])),
        convolution=draw(st.integers(1, 4)),
        norm=draw(st.sampled_from([NoNorm(), RMSNorm()])),
    )


@st.composite
def mamba2s(draw: st.DrawFn) -> Mamba2:
    heads = draw(st.sampled_from([1, 2, 4]))
    return Mamba2(
        heads=heads,
        head_width=draw(st.sampled_from([None, 3])),
        state=draw(st.sampled_from([2, 5])),
        groups=draw(st.sampled_from([1, heads])),
        convolution=draw(st.integers(1, 4)),
        norm=draw(st.sampled_from([NoNorm(), RMSNorm()])),
    )


STATE_MIXERS: dict[str, st.SearchStrategy[LinearAttention | GatedDelta | Mamba2]] = {
    "linear_attention": linear_attentions(),
    "gated_delta": gated_deltas(),
    "mamba2": mamba2s(),
}
