"""What ranks do together: groups, replicas, sends in pairs, agreement."""
