"""Forecast of a training run on GPUs that need not be there: memory, time, price and the best split. Imports no torch.

estimate  Memory, time, speed and price of a training run for one split; the fastest split that fits
report    Table and figure of forecasts for several numbers of GPUs
split     The part of a model and of a step on each GPU, and its memory
work      FLOPs and bytes of a step, from the config alone, and their time on one GPU
workload  The training run that is forecast, of a recipe or of a model alone
"""
