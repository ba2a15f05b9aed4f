"""Functions of tensors with a faster implementation than torch's own, each with its reference.

cross_entropy     Cross-entropy of hidden states under a table of words
cuda_graph        CUDA graph capture and replay
dependent_launch  Programmatic dependent launch (PDL) in compiled steps
fused_activation  A product with a bias and the activation behind it, in a compiled step of half precision
gelu              GELU, in other steps than torch's where these take longer than all around them
matmul            Products of few rows with a matrix, as decode steps have
prepacked         Weights as a CPU's kernels read them, kept while a model decodes
reorder_rows      Rows that change places among few neighbours, in place, by one kernel
runtime           Where a layer runs, which decides what can run there
triton_kernels    Kernels of our own, in Triton, which a torch with CUDA has
"""
