"""Chat over a policy that speaks tokens: messages, tools, and lineages that keep what the model wrote token for token.

No torch, no I/O. The tokenizer is given.
"""
