"""How well a model predicts texts and chooses answers, and how far it is from another model."""

CONTEXT = 512  # tokens of a chunk, unless told otherwise
