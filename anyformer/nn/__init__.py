"""The model: modules on one device that know nothing of text, tasks or training.

attention    multi-head attention, self and cross
aux_outputs  Outputs of a training pass beside its result
block        A block
context      what a block is told beside its input
convolution  Convolution in place of self-attention
dense        Weights for pairs of positions in place of self-attention
dropout      Dropout that costs nothing where nothing is dropped, and little where something is
experts      feed-forwards that a router chooses for each token
feedforward  Feed-forward layers
heads        Heads
init         Initialisation
inputs       Inputs
latent       the same by way of a compressed vector
linear       Linear layers
lora         low-rank adapters beside linear layers; `merge` makes them part of the weights
mixer        what may stand in attention's place: recurrent, convolution, dense
model        The Transformer
norm         Norms
pooling      Pooling between the stages of an encoder, and the way back to its tokens (Funnel-Transformer, Dai et al
recurrent    Recurrent mixers
stack        A stack
"""
