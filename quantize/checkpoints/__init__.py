"""Checkpoint formats behind one face: a description and lazy tensors."""
