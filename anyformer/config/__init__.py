"""The grammar of models: what a Transformer can be, without torch.

Alternatives are types with a `kind`; a field exists only where it has meaning; "nothing" is the kind "none". A field
that is `None` by default follows from the others, as its comment says. Everything is frozen and hashable.
Legend of sizes: b batch, t query length, s key length, d width, h heads, g key/value heads, k head width,
f feed-forward width, e embedding width, v vocabulary.

adapter       low-rank adapters, and the linear layers that may have one
block         blocks and stacks
feedforward   activations, feed-forwards
inputs_heads  Where a model begins and ends
io            TOML and JSON, overrides, differences, the schema
mixer         attention, and what may stand in its place
model         ModelConfig and the rules between its parts
norm          norms
overrides     Changing a spec by dotted paths, and telling two specs apart
parse         From a spec to plain data and back, with every fault of the data at once
pattern       which keys a query may see
position      position schemes, each with its mathematics
schema        The JSON schema of a spec, by which editors complete and check configs
spec          what every spec shares, and errors in the user's words
"""

# Stars, so that a part which enters one of these files is public without a second edit.
from anyformer.config import io as io
from anyformer.config.adapter import LoRA as LoRA, Matrix as Matrix
from anyformer.config.block import *
from anyformer.config.feedforward import *
from anyformer.config.inputs_heads import *
from anyformer.config.mixer import *
from anyformer.config.model import *
from anyformer.config.norm import *
from anyformer.config.pattern import *
from anyformer.config.position import *
from anyformer.config.spec import ConfigError as ConfigError, Fault as Fault, Spec as Spec
