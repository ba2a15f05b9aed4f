"""Looking inside: the real model, its activations by name, and what they tell.

    taps          the names of all activations; `run_with_taps`
    maps          `attention_maps`
    patch         `run_with_patches`
    ablate        `run_without_heads`, `head_scores`
    lens          `logit_lens`
    patterns      `head_statistics`: where each head looks, in numbers and by name
    terms         `score_terms`: content and position in a score
    curves        `position_curves`: what positions add to scores, by distance
    attribution   `attribute`: gradient × input
    growth        `cache_growth`: bytes of the key/value cache, step by step
    measures      one number of an output, for head scores and attribution
    count         parameters, FLOPs and memory, from the config alone
    memory        `training_memory`: the peak of a training step, likewise
    plot          a figure of each; `cells`: maps in the terminal

Functions take a model and what it would be called with, and give plain tensors. Each is imported from its file:
`from anyformer.inspection.logit_lens import logit_lens`.
"""
