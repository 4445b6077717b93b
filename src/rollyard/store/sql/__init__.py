"""The store in SQL, for both databases: schema, reads, writes, recovery and retention."""
