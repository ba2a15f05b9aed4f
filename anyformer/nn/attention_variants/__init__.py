"""Attention with other queries, keys or scores than the plain projections of `attention.py`.

disentangled  scores between content and distance (DeBERTa)
global_tokens  separate projections of global tokens (Longformer)
latent        queries, keys and values through a compressed vector (MLA)
"""
