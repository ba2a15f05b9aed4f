"""Names of tasks and training that are stable."""

from anyformer.recipe.ready import read_recipe as read_recipe
from anyformer.tasks.base import total_loss as total_loss
from anyformer.tasks.classify import Classifying as Classifying
from anyformer.tasks.mlm import MaskedLanguageModelling as MaskedLanguageModelling
from anyformer.tasks.seq2seq import SequenceToSequence as SequenceToSequence
from anyformer.tasks.span_corruption import SpanCorrupting as SpanCorrupting, counts as counts
from anyformer.training.finetune import lr_scale as lr_scale
from anyformer.training.log import read_metrics as read_metrics
from anyformer.training.muon import COEFFICIENTS as COEFFICIENTS, orthogonalise as orthogonalise
from anyformer.training.optimizers import build_optimizer as build_optimizer
from anyformer.training.scheduled_sampling import mix_own_tokens as mix_own_tokens
from anyformer.training.width_transfer import width_scale as width_scale
