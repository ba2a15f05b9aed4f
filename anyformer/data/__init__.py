"""From files and invented tasks to batches of ids; knows nothing of nn.

batch                    From encoded examples to batches
chunks                   Files of any length in chunks of some megabytes, and chunks in documents
conll                    Reading sentences whose words stand one a line, with their tags in columns
counter_rng              Random numbers by counting
dynamic_loader           Examples that are drawn anew each time from texts
files                    Finding, unpacking and decoding files, whatever is in them
fingerprint              Fingerprints of data files, by which a resumed training knows that its data changed
lines                    Files of any length, line by line, with a bar on a terminal and plain lines elsewhere
loader                   Batches by number
prefetch                 Batches that a process of their own reads ahead
readers                  Reading examples from files
sentencepiece            SentencePiece models (Kudo & Richardson 2018)
sentencepiece_tokenizer  Text to ids by a SentencePiece model, as the slow tokenizers of `transformers` 4.x do it
shard_writer             Making shards
shards                   One long text as token ids
synthetic                Invented tasks
tables                   Reading tables
tokenizer                Text to ids and back, on the `tokenizers` library
tokenizer_files          The files of a tokenizer
tokenizer_trial          Trial of a foreign tokenizer in a child process
vocabulary               Learning a vocabulary from texts
"""
