"""Models split among processes, from outside the model code.

mesh  Arrangement of all processes along the axes data, context and tensor
"""
