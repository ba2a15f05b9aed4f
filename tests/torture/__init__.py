"""Long checks that the test command does not run: `make torture`, or `python -m tests.torture PART [--help]`.

kills      SIGKILL of training, over and over: every checkpoint is complete, the end has the same bits
restarts   SIGKILL and SIGSTOP of single ranks under torchrun: restarted without a person, the end has the same bits
folders    damaged run folders: a clear error, or the same results
configs    mutated configs and recipes: a clear error, or a model that is built
data       damaged data files: a clear error, or rows
predictions  SIGKILL of predictions, in one process and on Ray: the output of an undisturbed one

Each part is a module of that name with a function `main`, which reads its own arguments from `sys.argv`, prints counts
and exits with 1 where a law is broken.
"""
