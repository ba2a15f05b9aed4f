"""One experiment for each claim.

batchnorm        Layer norm and batch norm on rows of unequal length, in large and in small batches
bigbird          BigBird: cost and quality of sparse attention
bigram           A model without a mixer is a bigram model
cache            Speed and memory of the KV cache
cheating         A decoder without a causal mask learns to copy the next token
common           Helpers shared by several experiments
costs            Parameters and FLOPs of a block
credit           Credit assignment over long distances: attention and recurrence
diversity        One head and several, when two positions must be read at once
encoder_decoder  Recurrent encoder–decoders with and without attention, and a Transformer, by sentence length
experts          Experts against dense models of equal active parameters, and what routers divide by
extrapolation    Positions beyond the training length
forcing          Teacher forcing and free running
graph            Attention over a graph: message passing, and the adjacency as mask against full attention
heads            Heads share the width
layers           FLOPs, sequential steps and path lengths of mixers
little_data      Mixers on little and on much data
muon             Muon and AdamW with equal tuning
norms            Models without block norms, and without residuals, shallow and deep
positions        Attention without positions ignores order
recall           Recall of many pairs by mixers with a state, attention and a hybrid
scale            Scores without 1/sqrt(k)
sort_positions   Learned and sinusoidal positions on sorting: curves over steps
tagging          Tagging words by a fully connected window and by self-attention
variants         Attention with shared or missing projections
warmup           Warm-up for post-norm and pre-norm
width            Best learning rate by width, with and without muP
"""
