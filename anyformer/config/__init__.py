"""The grammar of models: what a Transformer can be, without torch.

Alternatives are types with a `kind`; a field exists only where it has meaning; "nothing" is the kind "none". A field
that is `None` by default follows from the others, as its comment says. Everything is frozen and hashable.
Legend of sizes: b batch, t query length, s key length, d width, h heads, g key/value heads, k head width,
f feed-forward width, e embedding width, v vocabulary.

adapter         low-rank adapters
attention       softmax attention and its variants
block           blocks (sublayers, norms, order), stacks of blocks, and the rules of a stack
cost            what a part costs, its linear layers, and what it stores in a cache
deprecated      stable names that end, and their warnings
disentangled    scores between content and distance
families        families of parts, with the methods of each
feedforward     activations; plain, gated and mixture-of-experts feed-forwards
heads           output layers: logits of tokens or labels, vectors
inputs          tokens, patches, sounds and features
io              TOML and JSON, overrides, differences, the schema
media           images, sounds and feature vectors between the tokens of a text
mixer           alternatives to attention: recurrent, convolution and others
model           ModelConfig, initialisation, special ids, and the rules between parts
norm            layer norm, RMS norm, batch norm, dynamic tanh
outside         parts of installed packages and of files
overrides       change a spec by dotted paths, and list the differences of two specs
parse           plain data to a spec and back, with all faults of the data at once
part            the base of parts, and how your own are made known
pattern         which keys a query may see
position        position schemes, each with its mathematics, and rotary angles for longer texts
schema          the JSON schema of a spec, for completion and checks in editors
scheme          base of position schemes: the hooks that they override
spec            the base of all specs, and errors with paths and suggestions
state_mixer     mixers with a matrix state: linear attention, the gated delta rule, Mamba-2
visibility      the base of patterns
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Stars, so that a part which enters one of these files is public without a second edit.
from anyformer.config.adapter import LoRA as LoRA
from anyformer.config.attention import *
from anyformer.config.block import *
from anyformer.config.cost import (
    Cost as Cost,
    Matrix as Matrix,
    Sizes as Sizes,
    linear as linear,
    linear_costs as linear_costs,
)
from anyformer.config.disentangled import *
from anyformer.config.families import *
from anyformer.config.feedforward import *
from anyformer.config.heads import *
from anyformer.config.inputs import *
from anyformer.config.media import *
from anyformer.config.mixer import *
from anyformer.config.model import *
from anyformer.config.norm import *
from anyformer.config.part import Part as Part, register as register
from anyformer.config.pattern import *
from anyformer.config.position import *
from anyformer.config.spec import FINDERS, ConfigError as ConfigError, Fault as Fault, Spec as Spec
from anyformer.config.state_mixer import *

if TYPE_CHECKING:
    from anyformer.config import io as io
    from anyformer.config.outside import import_file as import_file


def __getattr__(name: str) -> Any:
    """Import what reads and writes files, and parts from outside, when they are first used: a model needs neither."""
    if name == "io":
        return import_module("anyformer.config.io")
    if name == "import_file":
        return import_module("anyformer.config.outside").import_file
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'", name=name)


FINDERS.append(lambda: import_module("anyformer.config.outside").find())
