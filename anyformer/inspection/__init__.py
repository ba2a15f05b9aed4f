"""Looking inside: the real model, its activations by name, and what they tell.

Functions take a model and what it would be called with, and give plain tensors. Each is imported from its file:
`from anyformer.inspection.logit_lens import logit_lens`.

ablation         Heads switched off
attention_maps   Attention maps of the real model, recomputed beside the fast kernels
attribution      Gradient × input
cache_growth     How the key/value cache grows while a model decodes
capacity         Refuse what cannot fit into memory before it is allocated
cost_rules       What each part of a model costs, by its spec
count            What a model costs, from its config alone
head_patterns    Where each head looks
logit_lens       The logit lens
memory           How much memory a training step takes at its peak, from the config alone
patching         Activations of the real model, replaced or changed by name
plot             Figures, by matplotlib (the `plot` extra)
position_curves  What positions do to scores, by distance
scalar_outputs   One number of a model's output, of which one asks what it depends on
score_terms      A score taken apart
sublayers        The attentions of a model by the names of their sublayers
taps             Looking at the activations of the real model by name
terminal_maps    Attention maps in the terminal
"""
