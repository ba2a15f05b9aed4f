"""Figures: position schemes."""
