"""The training graph: the loss of a drafter and its gradients, for the device to run."""
