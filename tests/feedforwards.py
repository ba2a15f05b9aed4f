"""Random small feed-forwards, for the laws."""

from hypothesis import strategies as st

from anyformer.config import (
    Experts,
    Gated,
    Gelu,
    NoFeedForward,
    Plain,
    Relu,
    SigmoidTopK,
    Silu,
    SoftmaxTopK,
    SquaredRelu,
)

activations = st.sampled_from([Relu(), Gelu(), Gelu(approximate="tanh"), Silu(), SquaredRelu()])
sizes = {"width": st.sampled_from([None, 5]), "activation": activations, "bias": st.booleans()}
networks = st.one_of(
    st.builds(Plain, **sizes),
    st.builds(Gated, **sizes, limit=st.sampled_from([None, None, 0.5]), offset=st.sampled_from([0.0, 0.0, 1.0])),
)
routers = st.sampled_from(
    [
        SoftmaxTopK(),
        SoftmaxTopK(normalize=False, bias=True),
        SoftmaxTopK(scale=1.5, groups=2, top_groups=1),
        SigmoidTopK(),
        SigmoidTopK(normalize=False, scale=1.5, groups=2, top_groups=1),
    ]
)
shared = st.sampled_from([{}, {"shared": 1}, {"shared": 2, "shared_gate": True}])
experts = st.builds(
    lambda shared, **parts: Experts(count=4, **shared, **parts),
    shared=shared,
    top_k=st.integers(1, 2),
    router=routers,
    expert=networks,
)
feedforwards = st.one_of(st.just(NoFeedForward()), networks, experts)
