"""What commands share: processes that end, a result's environment, tables, searches, exit codes."""
