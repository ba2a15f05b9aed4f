"""A page in the browser that looks into runs: `anyformer explore RUN`, and `af.show` in a notebook.

opened      the runs that are looked into, and the way from a request to its answer
example     a text to begin with
asked       what the page may ask for
seen        one text as a model reads it, kept for all views of it
switches    heads switched off in whatever is done with a model
views       the answers of the views, as JSON: the table of all of them
answer      what a run says of a text
diagram     the block and the cache, from the config
writing     an answer that appears token by token
live        a run that is being trained
assemble    the page's files as one document
server      all of it on 127.0.0.1
show        the same in a notebook, and as a file
"""
