"""Gradients and weights by original name."""
