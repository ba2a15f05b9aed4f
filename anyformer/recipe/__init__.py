"""The grammar of training runs, without torch: the parts of a recipe.

batches         padded, packed, crops, ordered
data            the sources of a recipe, joined and mixed ones; random changes of images and sounds in training
label_task      tasks that give labels, numbers, vectors or spans
logger          where metrics are written beside metrics.jsonl
optimizer       optimisers and their settings
ready           the recipes that come with the package
recipe          Recipe and the rules between its parts, also for models that several processes share
schedule        learning-rate schedules
seq2seq_task    tasks that answer a source: seq2seq, preferences, rewards, mixtures
source          the family of data sources, and which fit which task
sources         sources in files: texts, lines, folders, arrays, shards
synthetic       synthetic sources: digits, dates, additions, scenes
table           tables as a source, and their formats
task            families of tasks: columns, metrics, the models they need; tasks of imported models
text_task       language models, conversations, actions; numbers as tokens
tokenizer       tokenizers: trained on the data, read from a file, or taken from a run or from shards
train           settings of the training loop and of processes
width_transfer  muP: one learning rate for models of all widths
"""

from typing import TYPE_CHECKING

from anyformer.config.deprecated import renamed

# Stars, so that a part which enters one of these files is public without a second edit.
from anyformer.recipe.batches import *
from anyformer.recipe.data import *
from anyformer.recipe.label_task import *
from anyformer.recipe.logger import *
from anyformer.recipe.optimizer import *
from anyformer.recipe.recipe import *
from anyformer.recipe.schedule import *
from anyformer.recipe.schedule import LinearDecay
from anyformer.recipe.seq2seq_task import *
from anyformer.recipe.source import *
from anyformer.recipe.sources import *
from anyformer.recipe.synthetic import *
from anyformer.recipe.table import *
from anyformer.recipe.task import *
from anyformer.recipe.text_task import *
from anyformer.recipe.tokenizer import *
from anyformer.recipe.train import *
from anyformer.recipe.width_transfer import *

if not TYPE_CHECKING:  # type checkers know the new names alone
    __getattr__ = renamed(__name__, {"Linear": LinearDecay}, ends="0.2.0")
