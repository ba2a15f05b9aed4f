"""The grammar of training runs: data, tokenizer, task, batches, optimiser, schedule. Imports no torch.

recipe     The grammar of runs
sources    The grammar of data
task       The grammar of tasks
tokenizer  The grammar of tokenizers
"""
