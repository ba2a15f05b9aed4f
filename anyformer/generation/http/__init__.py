"""The HTTP server (extra `serve`): OpenAI's interface, endpoints of encoders and translators, metrics and a page.

answers      pieces of text and tokens from the events of the engine
app          the application: endpoints, errors, /openapi.json
bodies       request bodies
completions  /v1/completions and /v1/chat/completions
encoders     /v1/embeddings, /v1/classify, /v1/tag, /v1/fill-mask, /v1/score, /v1/rerank and /v1/translate
errors       errors in OpenAI's shape
gate         request ids, keys, limits of size, number and time
info         models, tokens, health, version, metrics and the page
limits       limits of the server
metrics      metrics in the text format of Prometheus
replies      response bodies
server       sockets and signals
service      what all endpoints share
"""
