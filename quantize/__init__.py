"""From a checkpoint to a bundle: read, build graphs, quantise, compare."""
