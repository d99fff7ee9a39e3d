"""Network code that knows no models: HTTP client and server, links and typed calls between processes, repeated
background work, multipart forms, egress policy."""
