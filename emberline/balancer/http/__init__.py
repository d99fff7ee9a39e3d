"""Other people's servers over HTTP: a lean keep-alive client, and a server as an endpoint of the fleet."""
