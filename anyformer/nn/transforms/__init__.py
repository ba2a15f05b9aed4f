"""Changes to a built model: substitute faster classes, merge adapters, quantise weights, train in fp8.

arm_kernel          matmul of 4-bit weights on Arm CPUs, as a weight format
dot_product_format  matmul of 8- and 4-bit weights on CPUs with dot products, as a weight format
fp8                 matmuls of training in fp8, as a weight format
merge               merge low-rank adapters into the weights
quantise            quantise a model for decoding, or the frozen weights under an adapter (QLoRA)
rounding            weights as integers of 8 or 4 bits with scales, as a weight format
substitute          faster classes for the plain modules of `nn`, and back
"""
