"""The processes of a server: how the core and the HTTP workers are assembled and end."""
