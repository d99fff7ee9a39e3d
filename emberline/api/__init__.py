"""The HTTP APIs: each converts its requests to the canonical request of the service, and the events back.

    app = App(service, ApiSettings(auth))   # api/app.py: an ASGI application
    await serve(app, sock)                  # net/http_server.py: until SIGTERM, then a graceful shutdown

`routes.py` lists every route with its policy; `http/errors.py` is the one table of statuses and codes.
"""
