"""The command line, one module per command. `confide.cli.app` puts them together."""
