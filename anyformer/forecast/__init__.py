"""Forecast of a training run on GPUs that need not be there: memory, time, price and the best split. Imports no torch.

work          FLOPs and bytes that one micro-batch and one update move, from the config alone
"""
