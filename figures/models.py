"""Figures: shapes, embeddings, tokenizers, costs."""
