"""`standin-openai`: a server that speaks OpenAI's API and computes nothing, for tests and load.

It is true to the protocols of vLLM (NIXL pull, Mooncake) and SGLang (bootstrap room) between prefill and decode, keeps
a prefix cache of its own to tell cached tokens truly, and fails on demand.
"""
