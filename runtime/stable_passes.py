"""Cut scoring into passes in which a token's logits have the same bits whatever its neighbours.

Speculative decoding scores a token among drafts, plain decoding scores it alone. The sums of
the CPU provider's attention may then be taken in another order. The difference is tiny, but
quantised activations round it up to steps, and a greedy text can part at a near-tie. Quantised
and float32 products alike are free of this for two rows or more, so a single token is scored
twice in one pass; and attention's products over more than 128 channels change their order
where the last block of 128 keys is half full, so no pass crosses that place.

Measured with onnxruntime 1.32 on x86_64, AVX-512 and AVX2 (docs/exactness.md); the kernels of
another processor may differ, and tests/runtime/test_stable_passes.py tells.
"""

_KEY_BLOCK = 128
_LAST_BEFORE_HALF = 62
"""Position in a block of the last token that still sees at most half a block, when it is
scored together with one token after it."""


def stable_passes(start: int, num_tokens: int, head_dim: int) -> list[int]:
    """Lengths of the passes that score `num_tokens` tokens from position `start` on.

    A pass of one token stands for two rows, the token and itself once more.

    Args:
        start: Tokens in the cache.
        num_tokens: Tokens to score, at least one.
        head_dim: Channels of an attention head.
    """
    if head_dim <= _KEY_BLOCK:
        return [num_tokens]
    passes = []
    while num_tokens:
        room = (_LAST_BEFORE_HALF - start) % _KEY_BLOCK + 1
        passes.append(min(num_tokens, room))
        start += passes[-1]
        num_tokens -= passes[-1]
    return passes
