"""Mixers with a matrix state: linear recurrences with short convolutions and gates.

decay_init         initialisation of a decay per head
gated_delta        gated DeltaNet
linear_attention   linear attention, plain and gated
mamba2             Mamba-2
short_convolution  causal convolution of each channel over a few tokens
state_rows         rows of a call as a recurrence reads them: segments, padding and the cache
"""
