"""The web page that visualises runs: `anyformer explore RUN`, and `af.show` in a notebook.

diagram            Views `block` and `cache`: the model as a diagram and the growth of its KV cache, from the config
example_text       The text that the page shows first, from the run's data, and the folders of media files
film               Pictures of a view at the steps of a training as an animated GIF
follow             View `follow`: one output as sums over parts, tokens and dimensions
formulas           Formulas of the stages of the path, from the modules and settings of a part
generation_stream  View `write`: generated tokens one by one, with alternatives and the size of the cache
head_values        Views `scores`, `effects` and `ablated`: numbers of every head, and probabilities with some heads off
layer_stages       Stages of the path inside a layer, and the last ones: from hidden states to outputs
lens               Views `lens` and `cell`: the most probable output after each layer, at every position
lessons            Lessons in TOML files, and right answers to their questions, computed from the run
live_run           View `live`: metrics, snapshots and checkpoints of a run that is being trained
make_bundled       Train the run that the page opens if none is given
open_runs          Open runs and their steps, cache their traces, and answer the requests of the page
outputs            Outputs of a head by name, with their probabilities
patch              View `patch`: activations of a second text in place of the first text's
path_outline       View `path`: the stages of a forward pass
path_place         One token on its path: a stack, a layer, a head and its attention
path_stages        View `stage`: the numbers of one stage, for one token, layer and head
prediction         Views `read` and `answer`: tokens of a text, pixels of its images, and the prediction for it
requests           Specs of requests, so that a wrong one gets a readable error
rotation           View `rotation`: q and k before and after rotary positions, and their score by distance
salience           View `salience`: the contribution of each input token to an output
server             HTTP server on 127.0.0.1
show               The page as one document: for the server, notebooks and files
surprise           View `surprise`: the log-probability of each token of a text
trace              Activations of one forward pass over a text, shared by all views
vectors            Numbers of views as plain values
view               The base of views, and the requests of a saved page
views              Views of attention and logits
"""
