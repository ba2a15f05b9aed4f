"""The command line. A verb is a thin function with `@app.command()` in the file of its idea; a new file is named here.

Importing it, and most verbs, import no torch: what a verb needs it imports inside.

app               The program
data              The verbs about corpora that are larger than memory
decoding_options  The options of all verbs that let a run write
explore           The verb that opens the page
generate          The verb that lets a run write
inspect           The verb that shows where a run's model looks
lab               The verb of the lab
models            The verbs about models and their configs, and about the machine they would run on
progress          How far a long job is
resolve           What a word on the command line stands for
runs              The verbs that make a run and use it
tokenizers        The verbs about tokenizers
"""

# each adds its verbs, in this order
from anyformer.cli import models, runs, generate, tokenizers, data, inspect, explore, lab  # noqa: F401, I001
from anyformer.cli.app import app as app, main as main
