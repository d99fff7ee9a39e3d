"""Turns what a caller demands of a reply (schema, regex, choices, tools …) into a `protocol.grammar.Grammar`."""
