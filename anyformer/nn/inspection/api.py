"""Names for looking inside a model that are stable."""

from anyformer.nn.inspection.ablation import (
    head_scores as head_scores,
    log_probability as log_probability,
    logit as logit,
    run_without_heads as run_without_heads,
)
from anyformer.nn.inspection.attention_maps import attention_maps as attention_maps
from anyformer.nn.inspection.attribution import attribute as attribute, integrated_gradients as integrated_gradients
from anyformer.nn.inspection.cache_growth import cache_growth as cache_growth
from anyformer.nn.inspection.head_patterns import head_statistics as head_statistics
from anyformer.nn.inspection.logit_terms import logit_lens as logit_lens, logit_terms as logit_terms
from anyformer.nn.inspection.score_terms import position_curves as position_curves, score_terms as score_terms
from anyformer.nn.inspection.taps import run_with_patches as run_with_patches, run_with_taps as run_with_taps
