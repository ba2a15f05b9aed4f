"""Claims, one file each.

batchnorm      Layer norm and batch norm on rows of unequal length, in large and in small batches
bigbird        BigBird
bigram         Without a mixer no token reads another
cache          The key/value cache
cheating       A decoder that sees what it is to predict learns to look it up, and nothing else
common         What several experiments use
costs          Parameters and FLOPs of a block
credit         Long-range credit
diversity      One head and several, where two places must be read at once
extrapolation  Positions beyond the training length
forcing        Teacher forcing and free running
heads          Heads share the width
layers         Mixers compared
little_data    Little data and much
norms          Models without block norms, and without residuals, shallow and deep
positions      Order
scale          Scores without 1/sqrt(k)
variants       Attention with less
warmup         Post-norm and the first steps
"""
