"""Ranks that are not there: what a network costs, and process groups of which one rank is real."""
