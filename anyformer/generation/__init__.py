"""Decoding: from a model and ids to more ids. It never sees text.

A `Request` says what to decode and by which strategy; `strategy.run` takes it. Each strategy is a loop over a
`Session`, which reads tokens with a KV cache.

api               the stable names of decoding
batch             predictions over large inputs
beam_search       beam search, diverse beam search, and lexically constrained beam search
buffers           tensors with fixed addresses and their CUDA graphs, kept between calls
check             checks of single option values
constraints       constraints on answers: regular expressions, JSON schemas, phrases, banned strings
contrastive       contrastive search
drafters          draft tokens by a smaller model, by lookup, or by the model's own layers
engine            continuous batching of requests: `Engine`
filters           the options that change logits, such as penalties and top-k
generate          greedy decoding and sampling, at once or as a stream
http              the HTTP server (extra `serve`)
logit_processors  the filters of a strategy and the mask of a constraint as functions of logits
prefill           reading prompts or sources before the first step
prefix_cache      `Reuse`: beginnings of prompts that earlier calls have read
ray_cluster       Ray clusters: one that is running, or a new one on this machine
request           `Request`: prompts and all options, also for the engine
sampling          choice of one token, with stateless noise
score             log-probabilities of given tokens, and the top tokens at a position or mask
session           `Session`: rows being continued, their cache and next logits
speculative       speculative decoding with a draft model, prompt lookup or the model's own layers
step              one decode step, and its compilation
strategy          strategies as specs, and the table of all options
top_k             top-k, log-sum-exp and argmax over a vocabulary in one pass
verifier          verification of draft tokens, for all rows and drafts at once
"""
