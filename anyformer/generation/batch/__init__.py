"""Predictions over large inputs: bounded memory, resumable, on one machine or on a Ray cluster.

input_lines   lines of a file or stream, in windows
partial_file  output of one file, which a later run continues if this one is killed
predictor     `Predictor`: a picklable function of batches, for Ray Data, `datasets` and Spark
ray_workers   shards on the workers of a Ray cluster
shards        outputs of several files: made in shards, joined in order
stream        windows from a reader to a sink, and notes about their lines
"""

from anyformer.generation.batch.predictor import Predictor as Predictor
