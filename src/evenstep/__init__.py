"""Train a PyTorch model on any number of processes, with the same result on each."""
