"""HTTP/1.1 for untrusted clients: one ASGI server for the service's port and for the sandboxes' doorways.

The parser is httptools. Before an app is called, `ListenerBounds` limits everything else: connections, headers, bodies,
and the time that each part of a request may take. No lifespan, no WebSockets, no HTTP/2.
"""

from rollyard.http._exchange import SEND_NOW, AsgiApp
from rollyard.http.bounds import ListenerBounds
from rollyard.http.refusals import Reason, Refusals, problem_body
from rollyard.http.server import HttpServer

__all__ = ["SEND_NOW", "AsgiApp", "HttpServer", "ListenerBounds", "Reason", "Refusals", "problem_body"]
