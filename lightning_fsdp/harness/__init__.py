"""What the commands share: processes that end, the environment of a result, tables to paste."""
