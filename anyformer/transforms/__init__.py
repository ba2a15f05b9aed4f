"""Changes to a built model: merge adapters, quantise weights, train in fp8.

fp8       Products of training in fp8 (Micikevicius et al
merge     Adapters into the weights beside which they stand
quantise  Weights of 8 or 4 bits, for decoding
"""
