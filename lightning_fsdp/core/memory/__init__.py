"""Memory on the host: shards that live there, and what the C library keeps."""
