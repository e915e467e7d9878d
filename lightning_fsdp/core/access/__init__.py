"""Gradients and weights by name, norms, and operations that mean the whole."""
