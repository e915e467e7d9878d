"""One face for several implementations of sharding."""
