"""Names of decoding and serving that are stable: strategies, filters, searches."""

from anyformer.generation.batch.predictor import Predictor as Predictor
from anyformer.generation.beam_search import beam_search as beam_search
from anyformer.generation.constraints.constraint import Trie as Trie
from anyformer.generation.filters import (
    MinP as MinP,
    RepetitionPenalty as RepetitionPenalty,
    SamplingFilter as SamplingFilter,
    TopK as TopK,
    TopP as TopP,
    ban as ban,
)
from anyformer.generation.logit_processors import History as History, Temperature as Temperature
from anyformer.generation.ray_cluster import ray_cluster as ray_cluster
from anyformer.generation.request import Request as Request
from anyformer.generation.sampling import sample as sample
from anyformer.generation.score import fill_mask as fill_mask, score as score, sliding as sliding
from anyformer.generation.speculative import speculate as speculate
from anyformer.generation.strategy import (
    Beam as Beam,
    Contrastive as Contrastive,
    Draft as Draft,
    Lookup as Lookup,
    OwnHead as OwnHead,
)
