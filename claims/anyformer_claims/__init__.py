"""Twenty-six claims about Transformers, each tested by an experiment: `anyformer lab NAME`.

The class `Claim` of a file is a part of the family `Experiment`; its texts are in the TOML file beside it.

batchnorm        Layer norm and batch norm on rows of unequal length, in large and in small batches
bigbird          BigBird: cost and quality of sparse attention
bigram           A model without a mixer is a bigram model
cache            Speed and memory of the KV cache
cheating         A decoder without a causal mask learns to copy the next token
common           Helpers shared by several claims
costs            Parameters and FLOPs of a block
credit           Credit assignment over long distances: attention and recurrence
diversity        One head and several, when two positions must be read at once
encoder_decoder  Recurrent encoder–decoders with and without attention, and a Transformer, by sentence length
experts          Experts against dense models of equal active parameters, and what routers divide by
extrapolation    Positions beyond the training length
forcing          Teacher forcing and free running
graph            Attention over a graph: message passing, and the adjacency as mask against full attention
heads            Heads share the width
layers           FLOPs, sequential steps and path lengths of mixers
little_data      Mixers on little and on much data
muon             Muon and AdamW with equal tuning
norms            Models without block norms, and without residuals, shallow and deep
positions        Attention without positions ignores order
recall           Recall of many pairs by mixers with a state, attention and a hybrid
scale            Scores without 1/sqrt(k)
sort_positions   Learned and sinusoidal positions on sorting: curves over steps
tagging          Tagging words by a fully connected window and by self-attention
variants         Attention with shared or missing projections
warmup           Warm-up for post-norm and pre-norm
width            Best learning rate by width, with and without muP
"""

from anyformer_claims.batchnorm import Claim as Batchnorm
from anyformer_claims.bigbird import Claim as Bigbird
from anyformer_claims.bigram import Claim as Bigram
from anyformer_claims.cache import Claim as Cache
from anyformer_claims.cheating import Claim as Cheating
from anyformer_claims.costs import Claim as Costs
from anyformer_claims.credit import Claim as Credit
from anyformer_claims.diversity import Claim as Diversity
from anyformer_claims.encoder_decoder import Claim as EncoderDecoder
from anyformer_claims.experts import Claim as Experts
from anyformer_claims.extrapolation import Claim as Extrapolation
from anyformer_claims.forcing import Claim as Forcing
from anyformer_claims.graph import Claim as Graph
from anyformer_claims.heads import Claim as Heads
from anyformer_claims.layers import Claim as Layers
from anyformer_claims.little_data import Claim as LittleData
from anyformer_claims.muon import Claim as Muon
from anyformer_claims.norms import Claim as Norms
from anyformer_claims.positions import Claim as Positions
from anyformer_claims.recall import Claim as Recall
from anyformer_claims.scale import Claim as Scale
from anyformer_claims.sort_positions import Claim as SortPositions
from anyformer_claims.tagging import Claim as Tagging
from anyformer_claims.variants import Claim as Variants
from anyformer_claims.warmup import Claim as Warmup
from anyformer_claims.width import Claim as Width

__version__ = "0.1.0"
