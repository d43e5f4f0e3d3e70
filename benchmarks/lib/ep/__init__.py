"""Expert parallelism on this machine: engines of several ranks, their steps and rows of results."""
