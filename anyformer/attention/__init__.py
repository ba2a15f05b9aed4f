"""Attention: token layouts, masks, the choice of a kernel, and the call of it.

attend           Attention at work
few_queries      Attention of few queries to a cache
flex             FlexAttention
layout           Who sees whom
lower            Which kernel runs, and what it is told
position_tables  A position scheme at work
varlen           Attention over documents one after the other, without a mask
"""
