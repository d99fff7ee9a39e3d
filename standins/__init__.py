"""Stand-ins for engines, servers and providers, for tests and benchmarks. No part of the package that users install."""
