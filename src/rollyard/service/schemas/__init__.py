"""The bodies of the HTTP API: requests, records and pages."""
