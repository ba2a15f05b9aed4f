"""Training: one straight loop over built objects, and what it needs to stop at any moment and go on the same.

checkpoint          All that resumes, in one object, and its way to disk and back
compiler            How the kernels of a step are compiled
ema                 The moving average of the weights
finetune            Beginning with the weights of another run
log                 What a person sees of a run
loop                The loop
objective           What a step makes small, as one function of a batch
optimisers          Optimisers, with weight decay on matrices only, and a pace for each layer
out_of_memory       Running out of memory, told as what to lower
parallel            More than one process
pending_scalars     Numbers of a step that are read while the device works on the next one
plan                What a training would do and take, from its data, its model and a few real steps
prepare             From a recipe to built objects
resume              The folder of a run before training
schedule            Learning-rate schedules
scheduled_sampling  What a decoder reads while it learns
signals             Requests to stop
snapshots           Snapshots
step_graphs         Work on a GPU that comes again in the same shapes
train               `train`: from a recipe to a finished run
utilisation         How fast training could be
"""
