"""Costs compared with formulae by hand; `tests/laws` compares them with real models."""

import json

import pytest

from anyformer.config import (
    LM,
    Attention,
    Block,
    Classifier,
    ConfigError,
    DynamicTanh,
    FactorisedTable,
    Gated,
    Gelu,
    Latent,
    LayerNorm,
    Learned,
    MaskedLM,
    ModelConfig,
    NoHead,
    NoNorm,
    Parallel,
    Plain,
    Projected,
    Relu,
    RMSNorm,
    SpanBounds,
    Stack,
    T5Bias,
    TokenLabels,
    Tokens,
    Transform,
)
from anyformer.nn.inspection.count import PartCost, Table, count
from anyformer.presets import PRESETS, bart, bert, gpt2, llama, mistral, t5, vaswani

D, H, V, T, S, B, N = 64, 4, 97, 24, 10, 3, 5  # width, heads, vocabulary, lengths, batch, depth


def block(**changes: object) -> Block:
    """Return a block without biases and norms: nothing but matrices."""
    plain = Block(mixer=Attention(heads=H), feedforward=Plain(bias=False, activation=Relu()), norm=NoNorm())
    return plain.model_copy(update=changes)


def decoder(*blocks: Block, head: object = NoHead(), stack: dict[str, object] | None = None, **fields: object) -> Table:
    """Return the table of a decoder-only model for T tokens in B rows."""
    layers = Stack(depth=N, blocks=blocks or (block(),)).model_copy(update=stack or {})
    config = ModelConfig(width=D, target=Tokens(vocab=V), decoder=layers)
    return count(config.model_copy(update={"head": head, **fields}), T, batch=B)


def row(table: Table, part: str) -> PartCost:
    (match,) = [row for row in table.rows if row.part == part]
    return match


def parts(table: Table) -> list[str]:
    return [row.part for row in table.rows]


def test_a_block_is_four_and_eight_squares() -> None:
    table = decoder()
    attention, feedforward = row(table, "decoder self-attention"), row(table, "decoder feed-forward")
    assert (attention.layers, feedforward.layers) == (N, N)
    assert attention.parameters == N * 4 * D**2
    assert feedforward.parameters == N * 8 * D**2
    assert attention.flops == N * B * (2 * T * 4 * D**2 + 2 * 2 * T**2 * D)  # projections; scores and values
    assert feedforward.flops == N * B * 2 * T * 8 * D**2
    assert table.parameters == V * D + N * 12 * D**2


@pytest.mark.parametrize(
    ("attention", "matrices", "biases"),
    [
        ({"kv_heads": 1}, 2 * D * D + 2 * D * 16, 0),
        ({"key_width": 32}, 4 * D * H * 32, 0),
        ({"key_width": 32, "value_width": 8}, 2 * D * H * 32 + 2 * D * H * 8, 0),
        ({"projections": "shared_qk"}, 3 * D * D, 0),
        ({"projections": "shared_qkv"}, 2 * D * D, 0),
        ({"output": "none"}, 3 * D * D, 0),
        ({"bias": True, "output": Projected(bias=True)}, 4 * D * D, 4 * D),
        ({"qk_norm": RMSNorm()}, 4 * D * D, 2 * 16),
        ({"qk_norm": LayerNorm()}, 4 * D * D, 4 * 16),
        ({"qk_norm": RMSNorm(), "qk_norm_over": "projection", "kv_heads": 1}, 2 * D * D + 2 * D * 16, D + 16),
        ({"qk_norm": LayerNorm(), "qk_norm_over": "each_head"}, 4 * D * D, 4 * D),
    ],
)
def test_attention_of_any_shape(attention: dict[str, object], matrices: int, biases: int) -> None:
    mixer = Attention(heads=H, **attention)
    key, value = mixer.widths(D)
    found = row(decoder(block(mixer=mixer)), "decoder self-attention")
    assert found.parameters == N * (matrices + biases)
    assert found.flops == N * B * (2 * T * matrices + 2 * H * T * T * (key + value))
    assert found.cache_bytes == N * B * T * mixer.groups * (key + value) * 4


@pytest.mark.parametrize("query_rank", [None, 20])
def test_latent_attention(query_rank: int | None) -> None:
    """Down to the compressed vector and the shared key (both cached), up to keys and values of all heads."""
    compress = Latent(rank=12, rotary_width=6, query_rank=query_rank)
    mixer = Attention(heads=H, key_width=18, value_width=10, compress=compress)
    found = row(decoder(block(mixer=mixer)), "decoder self-attention")
    queries = D * 20 + 20 * H * 18 if query_rank else D * H * 18
    matrices = queries + D * (12 + 6) + 12 * H * (18 - 6 + 10) + H * 10 * D
    assert found.parameters == N * (matrices + 12 + (query_rank or 0))  # and the norms
    assert found.flops == N * B * (2 * T * matrices + 2 * H * T * T * (18 + 10))
    assert found.cache_bytes == N * B * T * (12 + 6) * 4


def test_heads_do_not_change_the_cost() -> None:
    """h heads of width d/h cost what one head of width d does."""
    one, many = (decoder(block(mixer=Attention(heads=n))) for n in (1, 16))
    assert (one.parameters, one.flops, one.cache_bytes) == (many.parameters, many.flops, many.cache_bytes)


def test_scores_overtake_projections_at_twice_the_width() -> None:
    """2·2·T²·d against 2·T·4·d²: equal at T = 2 d."""
    config = ModelConfig(width=D, target=Tokens(vocab=V), decoder=Stack(depth=1, blocks=(block(),)))
    attention = row(count(config, 2 * D), "decoder self-attention")
    assert attention.flops == 2 * (2 * (2 * D) * 4 * D**2)


def test_gated_feed_forward_has_three_matrices() -> None:
    table = decoder(block(feedforward=Gated(width=100, bias=True)))
    assert row(table, "decoder feed-forward").parameters == N * (3 * D * 100 + 200 + D)
    assert row(table, "decoder feed-forward").flops == N * B * T * 2 * 3 * D * 100


@pytest.mark.parametrize(
    ("placement", "order", "norms"),
    [
        ("pre", "sequential", 2),
        ("post", "sequential", 2),
        ("branch", "sequential", 2),
        ("sandwich", "sequential", 4),
        ("pre", "parallel", 2),
        ("post", "parallel", 1),
        ("branch", "parallel", 2),
        ("sandwich", "parallel", 4),
        ("pre", Parallel(shared_norm=True), 1),
        ("sandwich", Parallel(shared_norm=True), 3),
    ],
)
def test_norms_by_placement(placement: str, order: object, norms: int) -> None:
    kinds = {LayerNorm(): 2 * D, LayerNorm(bias=False): D, RMSNorm(): D, DynamicTanh(): 2 * D + 1, NoNorm(): 0}
    for norm, each in kinds.items():
        table = decoder(block(norm=norm, placement=placement, order=order), stack={"final_norm": norm})
        assert sum(r.parameters for r in table.rows if r.part == "decoder norms") == N * norms * each
        assert sum(r.parameters for r in table.rows if r.part == "decoder final norm") == each


def test_shared_layers_have_one_set_of_weights_and_run_every_time() -> None:
    blocks = block(), block(feedforward=Plain(width=7, bias=False))
    apart, shared = (decoder(*blocks, stack={"share": share}) for share in (False, True))
    assert (shared.flops, shared.cache_bytes, shared.activation_bytes) == (
        apart.flops,
        apart.cache_bytes,
        apart.activation_bytes,
    )
    assert row(shared, "decoder self-attention").parameters == 2 * 4 * D**2
    assert row(shared, "decoder feed-forward").parameters == 8 * D**2 + 2 * 7 * D
    assert row(shared, "decoder feed-forward").layers == N


def test_position_module() -> None:
    own = block(mixer=Attention(heads=H, position=T5Bias(buckets=16)))
    other = block(mixer=Attention(heads=2, position=T5Bias(buckets=16)))

    def tables(*blocks: Block, **stack: object) -> int:
        return row(decoder(*blocks, stack=stack), "decoder positions").parameters

    assert tables(position=Learned(length=30, offset=2)) == 32 * D
    assert tables(position=T5Bias()) == 32 * H
    assert tables(position=T5Bias(shared=False)) == N * 32 * H
    assert tables(position=T5Bias(shared=False), share=True) == 32 * H
    assert tables(block(), own, position=T5Bias()) == 32 * H + 16 * H  # two schemes in one stack
    assert tables(own, other) == 16 * (H + 2)  # one column per head
    assert tables(own, position=Learned(length=30)) == 30 * D + 16 * H
    assert "decoder positions" not in parts(decoder(stack={"position": "rotary"}))


@pytest.mark.parametrize(("project", "inner"), [("before_position", D), ("after_norm", 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_factorised_embeddings(project: str, inner: int, bias: bool) -> None:
    factorised = FactorisedTable(width=16, project=project, bias=bias)
    tokens = Tokens(vocab=V, table=factorised, types=2, norm=LayerNorm())
    table = decoder(target=tokens, stack={"position": Learned(length=30)}, head=LM(), tie="output")
    assert row(table, "target embeddings").parameters == V * 16 + 2 * inner + 2 * inner + 16 * D + bias * D
    assert row(table, "target embeddings").flops == 2 * B * T * 16 * D
    assert row(table, "decoder positions").parameters == 30 * inner
    assert row(table, "head").parameters == D * 16  # back to the embedding's width, then the shared table
    assert row(table, "head").flops == 2 * B * T * (D * 16 + 16 * V)


@pytest.mark.parametrize(
    ("head", "tie", "parameters", "rows", "matrices"),
    [
        (LM(), "none", V * D, B * T, V * D),
        (LM(bias=True), "output", V, B * T, V * D),
        (MaskedLM(), "output", D * D + D + 2 * D + V, B * T, D * D + V * D),
        (TokenLabels(labels=7), "none", 7 * D + 7, B * T, 7 * D),
        (TokenLabels(labels=7, crf=True), "none", 7 * D + 7 + 8 * 7, B * T, 7 * D),
        (SpanBounds(), "none", 2 * D + 2, B * T, 2 * D),
        (Classifier(labels=7, bias=False), "none", 7 * D, B, 7 * D),
        (Classifier(labels=7), "none", 7 * D + 7, B, 7 * D),  # one vector per row
        (Classifier(labels=7, transform=Transform(bias=False)), "none", D * D + 7 * D + 7, B, D * D + 7 * D),
    ],
)
def test_heads(head: object, tie: str, parameters: int, rows: int, matrices: int) -> None:
    found = row(decoder(head=head, tie=tie), "head")
    assert (found.parameters, found.flops) == (parameters, 2 * rows * matrices)


def test_cross_attention_reads_the_source() -> None:
    config = vaswani(depth=N, width=D, heads=H, vocab=V)
    table = count(config, T, batch=B, source_length=S)
    cross = row(table, "decoder cross-attention")
    assert cross.parameters == N * 4 * D**2
    assert cross.flops == N * B * (2 * 2 * T * D**2 + 2 * 2 * S * D**2 + 2 * 2 * T * S * D)
    assert cross.cache_bytes == N * B * S * 2 * D * 4
    assert row(table, "encoder feed-forward").flops == N * B * 2 * S * 8 * D**2
    assert row(table, "encoder self-attention").cache_bytes == 0
    assert row(table, "decoder norms").parameters == N * 3 * 2 * D
    assert row(table, "target embeddings").parameters == row(table, "head").parameters == 0  # all three are one
    assert count(config, T) == count(config, T, source_length=T)


def test_the_cache_of_a_grouped_model_with_a_window() -> None:
    """Mistral 7B in bf16: keys and values of 32 layers with 8 heads of 128, limited to the window."""
    assert count(mistral(), 4000, bytes_per_value=2).cache_bytes == 4000 * 32 * 2 * 8 * 128 * 2
    for length in (8192, 10**6):  # the window, the newest token, and a slot for padding
        assert count(mistral(), length, bytes_per_value=2).cache_bytes == (4095 + 2) * 32 * 2 * 8 * 128 * 2
    assert count(llama(), 1, bytes_per_value=2).cache_bytes == 4 * count(mistral(), 1, bytes_per_value=2).cache_bytes
    assert count(bert()).cache_bytes == 0


def test_activations_of_a_pre_norm_block() -> None:
    """Per token: 2 norm inputs, 2 branch inputs, q k v and the heads' outputs, the hidden layer (twice with GELU)."""
    for act, hidden in ((Relu(), 4 * D), (Gelu(), 8 * D)):
        table = decoder(block(norm=LayerNorm(), feedforward=Plain(activation=act)), head=LM(), tie="output")
        assert table.activation_bytes == 4 * B * T * (N * (2 * D + 2 * D + 4 * D + hidden) + D + V)
    gated = row(decoder(block(feedforward=Gated())), "decoder feed-forward")
    assert gated.activation_bytes == 4 * B * T * N * (D + 4 * 4 * D)
    parallel = decoder(block(order=Parallel(shared_norm=True), norm=LayerNorm()))
    assert parallel.activation_bytes == 4 * B * T * N * (D + D + 4 * D + 4 * D)  # one norm, one input for both


@pytest.mark.parametrize("name", PRESETS)
def test_everything_is_proportional_to_the_batch(name: str) -> None:
    one, many = (count(PRESETS[name](depth=2, width=64, heads=4), batch=n) for n in (1, 7))
    assert many.parameters == one.parameters
    assert many.flops == 7 * one.flops
    assert (many.activation_bytes, many.cache_bytes) == (7 * one.activation_bytes, 7 * one.cache_bytes)


@pytest.mark.parametrize("name", PRESETS)
def test_totals_are_the_sums(name: str) -> None:
    table = count(PRESETS[name]())
    report = json.loads(json.dumps(table.to_dict()))
    for number in ("parameters", "flops", "activation_bytes", "cache_bytes"):
        assert report[number] == getattr(table, number) == sum(row[number] for row in report["rows"])


def test_text() -> None:
    lines = str(count(gpt2())).splitlines()
    assert len({len(line) for line in lines[:-1]}) == 1  # aligned
    assert lines[0].split() == ["part", "layers", "parameters", "FLOPs", "activations", "KV", "cache"]
    assert lines[-2].split() == ["total", "124,439,808", "291.6", "G", "778.3", "MiB", "72.0", "MiB"]
    assert lines[-1] == "length 1,024, batch 1, 4 bytes a value"
    assert "source length 512" in str(count(t5(), source_length=512))


def test_a_length_past_the_positions_is_reported() -> None:
    table = count(bart(), 100, source_length=2000)
    assert table.too_long == ("encoder",)
    assert str(table).endswith("too long for the encoder: its positions end before")
    assert count(bart(), 1024).too_long == count(llama(), 10**6).too_long == ()


def test_wrong_sizes_are_errors() -> None:
    with pytest.raises(ConfigError) as error:
        count(gpt2(), 0, batch=-1, source_length=5)
    assert [fault.path for fault in error.value.faults] == ["length", "batch", "source_length"]
