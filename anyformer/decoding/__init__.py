"""Decoding: from a model and ids to more ids. Speaks ids, never text."""
