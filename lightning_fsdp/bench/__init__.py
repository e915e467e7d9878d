"""``python -m lightning_fsdp.bench``: one training under several strategies, measured alike."""
