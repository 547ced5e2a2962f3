"""The `quire` command: one module per subcommand, and the code they share."""
