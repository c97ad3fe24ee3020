"""Names of the optional inputs of a decoder graph, which its builder and the runtime share."""

LOGITS_FROM = "logits_from"
"""``[1]``: the first of the new positions that needs logits; 0 where it is not fed."""

ATTENTION_ROWS = "attention_rows"
"""``[1]``: how many rows attention sees at least; 1 where it is not fed.

The last new row stands in for the missing ones, and their keys land in the cache behind the new
tokens', where the next pass overwrites them. `attention_mask` counts them.
"""
