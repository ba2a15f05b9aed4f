"""Models split among processes, from outside the model code.

context  Rows whose tokens are split among processes, which gather keys and values (context parallelism)
mesh     Arrangement of all processes along the axes data, context and tensor
"""
