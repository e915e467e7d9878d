"""Memory on the host: shards and whole copies that live there, and when it goes back."""
