"""Serving: continuous batching of requests for all model shapes.

adapters        LoRA adapters that share the weights of one body
admission       checks of a request before it enters the queue
beams           beam search of one request, whose rows share pages
decode_batch    requests that decode one step ahead of the host, as arrays
encoders        texts to vectors, labels, tags, numbers and fillings of masks, in batches across requests
engine          `Engine`: requests from asyncio to the thread that runs the models, and events back
interface       events that answer requests, limits and errors
offline         continuous batching of many texts in the caller's thread
outbox          delivery of events to the event loops that wait for them
paged_server    continuous batching over a paged KV cache: prefill, decode steps, preemption
pages           pages on the host: reference counts, and beginnings of texts by hash
rows            rows of one call of a model: their integers on the host, and the same as tensors
runner          calls of a model on rows of its pool, replayed as CUDA graphs on a GPU
sampler         choice of the next tokens of many requests
sequence        a request that is being answered: its tokens, its pages, and its receiver
sequence_pages  pages of requests: the pool of a model, which models have one, and which request has which pages
serial          requests one after the other, for models whose state is not paged
stats           counters, gauges and histograms of one model
"""
