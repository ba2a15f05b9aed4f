"""State that decoding and segment recurrence carry between calls, outside the model.

kv_cache        The key/value cache
ring            A ring of slots for layers that look back a bounded way
segment_memory  The past
snapshot        What a cache holds of one row, taken out of it, and put into a row of another cache of the same model
"""
