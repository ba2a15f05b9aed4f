"""The model: modules on one device that know nothing of text, tasks or training.

context    what a block is told beside its input
mask       who sees whom: positions, segments, marks
attend     the only place that knows attention kernels
attention  multi-head attention, self and cross
position   the tables and hooks of a position scheme
norm, linear, ffn, block, stack, inputs, heads, model, cache, init
"""
