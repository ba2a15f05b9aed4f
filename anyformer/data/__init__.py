"""From files and invented tasks to batches of ids; knows nothing of nn."""
