"""The command line, one module per command. `confide.cli` puts them together."""
