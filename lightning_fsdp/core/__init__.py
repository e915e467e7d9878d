"""Sharding itself: torch only. Start reading at ``fully_shard.py``, or at ``layout.py``."""
