"""Attention: token layouts, masks lowered for a kernel, the choice of that kernel, and the call.

attend           The mask for a kernel, and the call: dispatch over the kernels, with `eager`, their reference
cache            State between calls: KV caches, recurrent states, segment memory
choose           The decision for a kernel, with its reason, from Python facts
explain          The kernel that a layer would run on, without running it
few_queries      Attention of few queries to a KV cache, the kernel of decode steps
flex             FlexAttention: skips blocks of keys that no query sees
layout           Positions, segments and marks of tokens, and visibility: the definition of every mask
lowered          The lowered mask: Dense, FewQueries, ShortRows, Blocks or Documents
media_batch      Images, sounds and features of a batch
padding          Rows of ids of unequal length as one padded tensor
position_module  Position schemes as modules with their learned tables
scores           Attention scores, cap(q kᵀ · scale)
short_rows       Attention within short rows, with a mask or without, the kernel of compiled training on them
varlen           Attention over concatenated documents without a mask
"""
