"""Network code that knows no models: HTTP client and server, links and typed calls between processes, background loops, multipart forms,
egress policy."""
