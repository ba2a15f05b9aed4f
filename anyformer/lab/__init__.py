"""The lab: claims about Transformers put to the test, and comparisons of one's own under an equal budget."""
