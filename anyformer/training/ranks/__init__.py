"""Models split among processes, from outside the model code.

collectives       Exchanges within a group of tensor parallelism, and their gradients
context           Rows whose tokens are split among processes, which gather keys and values (context parallelism)
mesh              Arrangement of all processes along the axes data, context and tensor
split_modules     Attention, feed-forwards, experts, embedding and output table of which each process has a part
tensor            How a model is split among processes (tensor parallelism)
"""
