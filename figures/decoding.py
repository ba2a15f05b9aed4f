"""Figures: KV cache, sampling, beam search."""
