"""Evaluation of language models by log-likelihoods: local task files, and lm-evaluation-harness.

harness     `HarnessModel`: a run as a model of lm-evaluation-harness
likelihood  Log-likelihoods of continuations and of whole texts
measure     Metrics of a task file: `evaluate_file`
task_file   Read task files: YAML with prompts as templates, and rows of JSON
"""

from anyformer.lab.evaluation.likelihood import Likelihood as Likelihood, continuations as continuations, texts as texts
from anyformer.lab.evaluation.measure import evaluate_file as evaluate_file
