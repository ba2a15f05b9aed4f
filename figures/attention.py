"""Figures: scaled dot products, heads, masks, sparse patterns, graphs."""
