"""How much memory a rank will need, and the largest batch that fits, without weights or ranks."""
