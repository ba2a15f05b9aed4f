"""Training: from a recipe to a run folder, in a loop that can be stopped at any step and resumed with the same bits.

api                 The stable names of tasks and training
checkpoint          State of a run, and checkpoints: written atomically, verified, restored
compile_cache       Compiled code in the user's cache folder, verified by SHA-256
distillation        A frozen teacher, and the loss of its student
doctor              What this machine has, and what training chooses on it
finetune            Weights from another run, frozen weights, layer-wise learning rates
first_rows          First rows of a batch as text
forecast            memory, time and price of a training run on GPUs that need not be there
job                 The built objects of one run: model, optimiser, loader, state
log                 Progress bar, metrics.jsonl, TensorBoard, loss curve
loop                The loop: steps, evaluations, snapshots, checkpoints
machine             Choice of device, precision, compilation and threads; peak speed (MFU)
make_task           The task of a recipe with its tokenizers, and the model's config
muon                orthogonal updates of hidden matrices
new_recipe          Recipes for a user's own files: what `new` writes
objective           Model and loss as one module, compiled together
optimizers          Optimisers from their specs
out_of_memory       Out-of-memory errors with advice
pace                Training for a number of minutes: the time of each step, recorded and repeated
parallel            Several processes: collectives, DDP, FSDP
plan                Dry run: data, memory and time before training
prepare             From a recipe to a job: data, tokenizer, model, checkpoint
ranks               one model on several processes: mesh, split modules, collectives
resume              Checkpoint to resume from, and changed data
saving              Checkpoints written by a thread while training continues, and snapshots for `anyformer explore`
scheduled_sampling  Scheduled sampling: the decoder reads some of its tokens
signals             SIGINT and SIGTERM as requests to stop; time limit of every phase, for processes that hang
step                One step: forward, backward, clipping, update, moving average of the weights; its compiled code
step_graphs         CUDA graphs of steps
train               `train`, `evaluate` and `merge`
width_transfer      Hidden matrices of a model; initial weights and learning rates by width (muP)
"""
