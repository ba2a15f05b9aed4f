"""Run folders: written atomically, locked, verified. A run is a trained model with its task and tokenizers.

atomic_folder   folders with a manifest: written atomically, verified by SHA-256
processes       processes that end with their parent, locks between them, workers
run             `Run` and `load`: a run folder in memory
run_inspection  attention maps of a run
"""
