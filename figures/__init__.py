"""Figures of the documentation, each drawn by one function from the library's own code.

`python -m figures` draws all of them into docs/figures, `python -m figures rotary alibi` some.

diagram     boxes and arrows
style       colours, sizes, and the register of drawing functions
blocks      parts of a block: linear layers, norms, dropout, residuals, placement of norms
networks    feed-forward networks: hidden units, activations, gates, experts
costs       mixers beside attention, FLOPs by length, embeddings, tied vocabularies
attention   scaled dot products, heads, masks, sparse patterns, graphs, long sequences
positions   position schemes
models      shapes, tokenizers
training    targets, loss, schedules, fine-tuning
processes   which part of weights and batch each process holds
decoding    KV cache, sampling, beam search
tutorials   results of the tutorials
readme_animation  the animated picture at the top of the README
"""
