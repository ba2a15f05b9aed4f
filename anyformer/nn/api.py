"""Names of `nn`, `attention` and `kernels` that are stable: for parts of your own, and shown by the concept pages."""

from anyformer.attention.attend import (
    Backend as Backend,
    attend as attend,
    lower as lower,
    lower_dense as lower_dense,
    mix as mix,
    weigh as weigh,
)
from anyformer.attention.cache.layer_cache import Int8Store as Int8Store
from anyformer.attention.cache.ring import Slots as Slots
from anyformer.attention.choose import Requirements as Requirements
from anyformer.attention.flex import find_blocks as find_blocks
from anyformer.attention.layout import make_layout as make_layout, sees as sees
from anyformer.attention.lowered import (
    Dense as Dense,
    Relation as Relation,
    add_bias as add_bias,
    densify as densify,
    mask_scores as mask_scores,
)
from anyformer.attention.media_batch import MediaBatch as MediaBatch
from anyformer.attention.position_module import Positions as Positions
from anyformer.attention.scores import Scoring as Scoring
from anyformer.kernels.chunked_recurrence import recur_in_chunks as recur_in_chunks
from anyformer.kernels.cross_entropy import token_loss as token_loss
from anyformer.kernels.dropout import Dropout as Dropout
from anyformer.kernels.linear_recurrence import Recurrence as Recurrence, recur as recur
from anyformer.kernels.runtime import Runtime as Runtime, at_least_fp32 as at_least_fp32
from anyformer.nn.attention import MultiHeadAttention as MultiHeadAttention
from anyformer.nn.aux_outputs import AuxOutputs as AuxOutputs
from anyformer.nn.block import build_block as build_block
from anyformer.nn.context import Context as Context
from anyformer.nn.convolution import ConvolutionMixer as ConvolutionMixer
from anyformer.nn.experts import StackedLinear as StackedLinear
from anyformer.nn.heads import labels_after as labels_after
from anyformer.nn.linear import Linear as Linear, OutBranch as OutBranch, split_heads as split_heads
from anyformer.nn.lora import LowRank as LowRank
from anyformer.nn.media import cut_patches as cut_patches
from anyformer.nn.pooling import Windows as Windows
from anyformer.nn.stack import SkipConnections as SkipConnections, Skipped as Skipped
from anyformer.nn.state_mixers.decay_init import reset_decay as reset_decay
from anyformer.nn.state_mixers.short_convolution import ShortConvolution as ShortConvolution
from anyformer.nn.state_mixers.state_rows import StateRows as StateRows
from anyformer.nn.transforms.merge import merge as merge
from anyformer.nn.transforms.rounding import round_off as round_off
