"""Tasks: what examples are in ids, what is lost on them, and how well a model does. One file each."""
