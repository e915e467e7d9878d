"""``python -m lightning_fsdp.compare``: which weights and gradients each engine lets one read."""
