"""Functions of tensors with a faster implementation than torch's own, each with its reference.

beam_candidates     The best continuations of beams, by two kernels that read the logits once
chunked_recurrence  Linear recurrences over matrix states, in matmuls over chunks of tokens
conventions       Values with one meaning in every tensor, the category of notes, the cache folder of the user
cross_entropy       Cross-entropy of hidden states and an output table, without keeping the logits
cuda_graph          CUDA graph capture and replay
dot_product         Linear layers of 8- and 4-bit weights on CPUs with dot products, by a kernel in C
dropout             Masks of dropout that are drawn faster than torch's
elementwise         Norms and gates of evaluation on a GPU, each by one kernel
expert_matmul       Linear layers of experts, each applied to its own rows
fp8                 Casts to fp8 with one scale for each row, alone and with the gradient of an activation
fused_activation    Linear layer and activation as one op, in compiled half-precision training
fused_convolution   Short causal convolution with SiLU, by Triton kernels
fused_recurrence    Linear recurrences over matrix states, by Triton kernels
gelu                A faster GELU where torch's erf or tanh dominates
gpu_table           data sheets of GPUs
hardware            limits of this machine: cores, memory, processes
int4                Linear layers of 4-bit weights on one row, on a GPU
linear_recurrence   Linear recurrences over matrix states, token by token
matmul              Linear layers on few rows, as in decode steps
narrow_norm         Norms of compiled training in bf16 that save smaller tensors
paged               New tokens of a paged KV cache, rotated heads, and reordered rows of beams, each by one kernel
prepacked           Weights in the memory layout of the CPU kernels, kept while a model decodes
private             Private functions of torch, looked up lazily, each with a public fallback; repairs of its compiler
runtime             Device, data type and mode of a layer, which decide the kernels that can run; functions as one op
short_rows          Attention within short rows and its gradients, by two Triton kernels
split_linear        Linear layer whose output is split, and the joined gradients of the parts by one kernel
triton_convolution  Triton kernels of a short causal convolution
triton_kernels      Triton kernels of losses, activations, caches, norms and gates, imported where they run
triton_matmul       Triton kernels of linear layers on few rows
triton_paged        Triton kernels of a paged KV cache
triton_recurrence   Triton kernels of chunked linear recurrences
triton_short_rows   Triton kernels of attention within short rows
triton_top_k        Triton kernels of beam search
"""
