"""anyformer beside its peers: the same work, the same machine, the same run.

python -m benchmarks.gpu    on a GPU    python -m benchmarks.cpu    on a CPU    (`make bench`)
"""
