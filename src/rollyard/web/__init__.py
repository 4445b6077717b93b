"""The dashboard: an HTML page, its styles and its ES modules, as files of this package.

There is no build step: `js/` is what browsers run, and `vendor/` are libraries as `scripts/vendor-web` wrote them. The
service serves these files (`service/routes/pages.py`); exports put them into one file (`rollyard.exports`).

Invariants. The page gets all its data from the public API. It shows what agents and tools wrote as text, never as
markup: no module assigns `innerHTML`, and the Content-Security-Policy allows neither inline scripts nor other hosts.
"""
