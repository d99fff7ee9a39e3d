"""From what a caller demands of a reply (schema, regex, choices, tools …) to a `protocol.grammar.Grammar`."""
