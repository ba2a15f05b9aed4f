"""Modules with weights: the model and its layers, on one device, without text, tasks or training.

api                 the stable names of nn, attention and kernels
attention           multi-head attention, self and cross
attention_variants  latent and disentangled attention, global tokens
aux_outputs         auxiliary losses and batch statistics of a training pass
block               block: sublayers, residual connections and norm placement
context             second argument of every block: masks, caches, taps
convolution         convolution in place of self-attention
dense               learned weights for pairs of positions in place of self-attention
eval_mode           a model in eval mode without gradients, as a context manager
experts             mixture of experts: routers, expert layers, load balance
feature_inputs      input layers of features, image patches and sounds
feedforward         feed-forward layers: plain and gated
heads               output heads: vocabulary, labels, pooled
init                weight initialisation
inputs              what a model reads, from the keywords of a call; token embeddings
inspection          what can be counted and read in a model
linear              linear layers, fused or single
lora                low-rank adapters (LoRA)
media               embeddings of images, sounds and feature vectors among tokens
model               Transformer: encoder-decoder, encoder or decoder
norm                norms: layer, RMS, batch
pooling             token pooling between stages of an encoder (Funnel-Transformer)
recurrent           RNN, LSTM or GRU in place of self-attention
stack               stack of blocks with its position schemes and final norm
state_mixers        linear attention, gated DeltaNet, Mamba-2
transforms          changes to a built model: faster classes, merged adapters, quantisation
uncached            decoding where layers store nothing
"""
