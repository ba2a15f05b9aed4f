"""State that decoding and segment recurrence carry between calls, outside the model.

kv_cache        KV cache: slots with positions and segments, for all layers
layer_cache     keys and values of one layer, exact or int8
paged           paged KV cache: pages of one pool, a table of pages for each row
ring            ring of slots for layers with a bounded window
segment_memory  segment memory (Transformer-XL): a model's `past`
snapshot        copy of one row of a KV cache, to start a row of another cache of the same model
states          recurrent states and tails of short convolutions: of constant size
"""
