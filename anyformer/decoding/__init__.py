"""Decoding: from a model and ids to more ids. Speaks ids, never text.

beam_search       Beam search
buffers           Where rows are decoded
check             Checks of the options of a decoding call, before anything is read
constraints       TODO
contrastive       Contrastive search (Su et al
generate          Autoregressive decoding with a cache, token by token, for decoder-only and encoder–decoder models al
logit_processors  What is done to logits before a token is chosen
prefill           Prompts and sources are read
prefix_cache      Prefix caching
sampling          Choosing the next token
score             How likely a model finds what is already written
session           A session
speculative       Speculative decoding
step              One decode step
strategy          How tokens are chosen
top_k             The k greatest of many numbers, and the weight of all, in one look
"""
