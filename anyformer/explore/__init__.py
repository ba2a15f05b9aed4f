"""A page in the browser that looks into runs: `anyformer explore RUN`, and `af.show` in a notebook.

diagram            the block and the cache, from the config
example_text       A text to begin with
generation_stream  An answer that appears token by token, with what else could have been said and the cache as it fill
head_switches      Heads switched off in whatever is done with a model
live_run           A run that is being trained
open_runs          The runs that are looked into
page_bundle        The page's files as one document
prediction         What a run says of a text
requests           What the page may ask for
server             all of it on 127.0.0.1
show               the same in a notebook, and as a file
trace              One text as a model reads it, kept for all views of it
views              the answers of the views, as JSON: the table of all of them
"""
