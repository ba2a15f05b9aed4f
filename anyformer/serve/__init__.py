"""Serving: continuous batching of requests for all model shapes, without HTTP.

admission  checks of a request before it enters the queue
engine     `Engine`: requests from asyncio to the thread that runs the models, and events back
http       the HTTP server (extra `serve`)
job        a request inside the engine, and the delivery of its events
pool       pages of a model: which models have a paged cache, sizes and number of pages
request    interface: requests, events, limits and errors
serial     requests one after the other, for models whose state is not paged
stats      counters, gauges and histograms of one model
"""
