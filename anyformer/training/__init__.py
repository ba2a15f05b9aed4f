"""Training: one straight loop over built objects, and what it needs to stop at any moment and go on the same."""
