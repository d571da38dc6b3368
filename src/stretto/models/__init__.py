"""Models: loading, tiny models, checksums, LoRA, and the decoder forwards that engine and trainer share."""
