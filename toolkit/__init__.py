"""Speculative decoding across vocabularies for Qualcomm Snapdragon NPUs."""

__version__ = "0.1.0"
