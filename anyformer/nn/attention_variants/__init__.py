"""Attention with other queries, keys or scores than the plain projections of `attention.py`.

cross         keys and values of the encoder's output
disentangled  scores between content and distance (DeBERTa)
global_tokens  separate projections of global tokens (Longformer)
latent        queries, keys and values through a compressed vector (MLA)
"""
