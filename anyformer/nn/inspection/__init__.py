"""Interpretability tools and cost estimates.

Functions take a model and the arguments of a call of it, and return plain tensors. Each is imported from its file:
`from anyformer.nn.inspection.logit_lens import logit_lens`.

ablation         Switch attention heads off and measure what changes
api              the stable names for looking inside a model
attention_maps   Attention weights of all layers and heads
attribution      Gradient × input and integrated gradients: the contribution of each input token to an output
cache_growth     Bytes of the KV cache after each decoded token
capacity         Refuse models that do not fit into memory, before allocating them
cost_rules       Parameters, FLOPs, activations and cache of each part of a model
count            Parameters, FLOPs, activations and cache of a model, from its config alone
frozen           Norms and output heads as linear maps, frozen at the values of one forward pass
head_patterns    Statistics of attention heads, and names such as "previous token" or "induction"
logit_lens       The logit lens: output of the head after each layer
logit_terms      Direct logit attribution: an output as a sum over layers, heads and tokens
memory           Peak memory of a training step, from the config alone
optimizer_cost   The weights that an optimiser changes, from the config alone
patching         Replace or change activations by name (activation patching)
plot             Figures by matplotlib (the `plot` extra)
position_curves  Effect of positions on attention scores, by distance
residual_stream  The residual stream inside a layer, rebuilt from recorded activations
scalar_outputs   Scalar functions of a model's output: a logit, a log-probability, a loss
score_terms      Split attention scores into content and position terms
sublayers        Look up the attention layers of a model by name
taps             Record activations by name, and the list of these names
terminal_maps    Attention maps in the terminal
"""
