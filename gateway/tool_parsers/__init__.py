"""Calls of tools, and thoughts, in what models write: a parser and a grammar for each family's format."""
