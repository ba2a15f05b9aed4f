"""Recipes for a user's own files: `anyformer new`. Imports torch only to measure a training step.

budget     number of steps that fits into a number of minutes, from a dry run
columns    Which column of a table is the text, the label, ...
data       Sources of a recipe: the split of each file, and how one file is split
draft      A recipe with its comments, and the reasons for each choice; batches and training loop
examine    The format of a file: table, CoNLL, labelled lines, plain text, folders
models     Models for each task, trained from scratch or from a run
overrides  KEY=VALUE for a drafted recipe: the lines that it changes
texts      Statistics of texts: script, lengths, words; the tokenizer that fits them
"""
