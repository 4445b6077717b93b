"""The catalog: an index of ended rollouts for people, with filters and full-text search.

It is a SQLite file beside the store (`catalog.db`), filled in the background from the store's terminal order. The store
is the source of truth: the file can be deleted at any time, and is built again.
"""

from rollyard.catalog.catalog import Catalog
from rollyard.catalog.filters import Filter
from rollyard.catalog.pages import FailureCount, ResultPage
from rollyard.catalog.search import InvalidSearch, Search
from rollyard.catalog.series import Series

__all__ = ["Catalog", "FailureCount", "Filter", "InvalidSearch", "ResultPage", "Search", "Series"]
