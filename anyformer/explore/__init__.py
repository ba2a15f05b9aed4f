"""The web page that visualises runs: `anyformer explore RUN`, and `af.show` in a notebook.

diagram            Views `block` and `cache`: the model as a diagram and the growth of its KV cache, from the config
example_text       The text that the page shows first, from the run's data, and the folders of media files
generation_stream  View `write`: generated tokens one by one, with alternatives and the size of the cache
head_switches      Run a model with some attention heads disabled
live_run           Metrics, snapshots and checkpoints of a run that is being trained
open_runs          Open runs, cache their traces, and answer the requests of the page
page_bundle        HTML, CSS and JavaScript as one document
pictures           Images and spectrograms of a text as pixels, with their places
prediction         View `read`: tokens of a text and the run's prediction for it
requests           A spec for each request of the page
server             HTTP server on 127.0.0.1
show               The page with all its answers, for notebooks and files
trace              Activations of one forward pass over a text, shared by all views
views              Views of attention and logits as JSON, and the table of all views
"""
