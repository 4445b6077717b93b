"""The store in an SQLite file: the writer, the readers and the lock."""
