"""Whole values: state in and out, initial values of models from the meta device."""
