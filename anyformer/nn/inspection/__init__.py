"""Interpretability tools and cost estimates.

Functions take a model and the arguments of a call of it, and return plain tensors. Each is imported from its file:
`from anyformer.nn.inspection.attention_maps import attention_maps`.

ablation         Switch attention heads off and measure what changes; logits, log-probabilities and losses as measures
api              the stable names for looking inside a model
attention_maps   Attention weights of all layers and heads
attribution      Gradient × input and integrated gradients: the contribution of each input token to an output
cache_growth     Bytes of the KV cache after each decoded token
cost_rules       Parameters, FLOPs, activations and cache of each part of a model
count            Parameters, FLOPs, activations and cache of a model, from its config alone
frozen           Norms and output heads as linear maps, frozen at the values of one forward pass
head_patterns    Statistics of attention heads, and names such as "previous token" or "induction"
logit_terms      The logit lens (the head after each layer), and an output as a sum over layers, heads and tokens
memory           Peak memory of a training step, from the config alone; refuse models that do not fit
plot             Figures by matplotlib (the `plot` extra)
residual_stream  The residual stream inside a layer, rebuilt from recorded activations
score_terms      Effect of positions on attention scores: as terms beside content, and by distance
sublayers        Look up the attention layers of a model by name
taps             Record, replace or change activations by name (activation patching), and the list of these names
terminal_maps    Attention maps in the terminal
"""
