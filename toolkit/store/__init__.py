"""Models on this machine: the local store, and bringing models there."""
