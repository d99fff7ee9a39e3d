"""The HTTP doors: one dialect in, one canonical request to the service, the dialect back out.

    app = create_app(service, ApiSettings(auth))    # api/app.py: an ASGI callable
    await serve(app, sock)                          # api/server.py: until SIGTERM, then the drain

`routes.py` lists every route with its policy; `errors.py` is the one table of statuses and codes.
"""
