"""The command line: one thin function with `@app.command()` per verb. A new module is imported below.

Importing it imports no torch, and neither do most verbs: a verb imports what it needs when it runs.

app               The program: help, exit codes, errors
chat              `chat`: a conversation with a chat model
check             `check`: the laws on your own parts
compare           `compare`: runs beside each other
data              `data`: token shards of large corpora
decoding_options  Options of all verbs that generate text
env               `env`: demonstrations and rollouts
explore           `explore`: the page in the browser
generate          `generate`: text from a prompt
inspect           `inspect`: attention maps in the terminal
lab               `lab`: experiments and grids
models            `presets`, `count`, `doctor` and `config`
new               `new`: a recipe for one's own files; `recipes`: those of the package
plan              `plan`: memory, time and price of a training run on GPUs
predict           `predict`: predictions for the lines of files
progress          Progress bars of long jobs
resolve           Names of presets, recipes, runs and files
runs              `train`, `evaluate`, `import`, `merge` and `export`
serve             `serve`: runs over HTTP
tokenizers        `tokenizer`: training and showing
torch_import      Import of torch while other modules are imported
verb              Verbs from outside
"""

# each adds its verbs, in this order
from anyformer.cli import models, check, plan, new, runs, predict, generate, chat, tokenizers, data, env  # noqa: F401, I001
from anyformer.cli import inspect, explore, compare, serve, lab  # noqa: F401
from anyformer.cli.app import app as app, main as main
