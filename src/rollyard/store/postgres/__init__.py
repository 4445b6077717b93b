"""The store in PostgreSQL: connections, the writer and the lock."""
