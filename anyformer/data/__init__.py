"""Data: from files and synthetic tasks to batches of token ids. Imports nothing of nn.

api                      the stable names of data
augment                  random changes of the images and sounds of a batch
batch                    examples and batches, and the tensors that rows of examples become
batch_plan               which examples each batch of an epoch holds: padded or packed rows
chat_template            chat templates: conversations to text and to ids
chunks                   large files in chunks of some megabytes, and chunks in documents
conll                    sentences with one word per line and its tags in columns
conversations            conversations in rows, and chat templates by name
counter_rng              a counter-based random generator, for draws that depend on a number alone
datasets                 data sets of the built-in recipes: registry, small sets, downloads
delimited                CSV with any delimiter, and delimiters in messages
files                    find, unpack and decode files
fingerprint              fingerprints of data files, by which a resumed training detects a change
image_pack               pack folders of images into one .npz file
key_to_door              the environment key-to-door, and random walks in it
lines                    large files line by line, with a progress bar
loader                   loaders of batches by number: shuffled epochs, random crops, ordered parts
media                    references to images, sounds and feature vectors in texts, and their tensors
media_files              files of images, sounds and numbers, arrays of them, and spectrograms
media_rows               references in the place of texts: entries of arrays, columns of paths, labelled sounds
parquet                  tables in Parquet
prefetch                 batches read ahead in a forked process
readers                  rows of a source, with the bad ones reported together
scenes                   pictures of coloured shapes, and sentences that describe them
sentencepiece            SentencePiece models: reading the file, and text to ids as the slow tokenizers do it
shard_writer             write shards: tokenise text of any size in parallel, resumably
shards                   one long text as token ids, in memory or in shards
squad                    questions with texts and answers, in the formats of SQuAD
synthetic                synthetic tasks: sorting, copying, reversing, dates, additions
tables                   columns of tables: cells, or records with named fields
template_sandbox         chat templates compiled and rendered by Jinja, with bounded work and output
text_rows                rows of plain text: documents, parallel lines, lines that a pattern matches, class folders
tokenizer                text to ids and back, on the `tokenizers` library
tokenizer_files          the files of a tokenizer, and the trial of a foreign one in a child process
trajectories             recorded episodes in files: arrays or JSON lines
vocabulary               train a vocabulary on texts
"""
