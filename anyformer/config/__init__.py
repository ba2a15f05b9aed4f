"""The grammar of models: what a Transformer can be, without torch.

spec      what every spec shares, and errors in the user's words
position  position schemes, each with its mathematics
parts     norms, activations, feed-forwards, attention, blocks, stacks
ends      inputs, heads, initialisation, special ids
model     ModelConfig and the rules between its parts
io        TOML and JSON, overrides, differences, the schema
"""

# Stars, so that a part which enters one of these files is public without a second edit.
from anyformer.config import io as io
from anyformer.config.ends import *
from anyformer.config.model import *
from anyformer.config.parts import *
from anyformer.config.position import *
from anyformer.config.spec import ConfigError as ConfigError, Fault as Fault, Spec as Spec
