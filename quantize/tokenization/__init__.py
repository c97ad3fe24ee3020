"""Tokenizers as exact `tokenizer.json` documents, read or rebuilt."""
