"""Evaluation of language models by log-likelihoods, on the tasks of lm-evaluation-harness.

harness     A run as a model of lm-evaluation-harness, and its metrics on tasks
likelihood  Log-likelihoods of continuations and of whole texts
"""

from anyformer.lab.evaluation.likelihood import Likelihood as Likelihood, continuations as continuations, texts as texts
