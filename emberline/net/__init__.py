"""Network code that knows no models: HTTP client and server, process links, multipart forms, egress policy."""
