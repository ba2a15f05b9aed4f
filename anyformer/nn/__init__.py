"""The model: modules on one device that know nothing of text, tasks or training.

context    what a block is told beside its input
mask       who sees whom: positions, segments, marks
attend     the only place that knows attention kernels
attention  multi-head attention, self and cross
latent     the same by way of a compressed vector
cache      keys and values read so far, outside the model
ring       the slots of layers that look back a bounded way
mixer      what may stand in attention's place: recurrent, convolution, dense
position   the tables and hooks of a position scheme
fp8        products of training in eight bits
lora       low-rank adapters beside linear layers; `merge` makes them part of the weights
experts    feed-forwards that a router chooses for each token
running    what a training pass leaves behind: terms of the loss, statistics of the batch
norm, linear, ffn, block, stack, inputs, heads, model, init
"""
