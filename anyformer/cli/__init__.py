"""The command line. A verb is a thin function with `@app.command()` in the file of its idea; a new file is named here.

Importing it, and most verbs, import no torch: what a verb needs it imports inside.
"""

# each adds its verbs, in this order
from anyformer.cli import models, runs, generate, tokenizers, data, inspect, explore, lab  # noqa: F401, I001
from anyformer.cli.app import app as app, main as main
