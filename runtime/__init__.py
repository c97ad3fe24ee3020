"""From a bundle to tokens: sessions, KV cache, causal language models. Never torch."""
