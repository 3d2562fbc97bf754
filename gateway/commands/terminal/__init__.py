"""What a command reads from and prints to a terminal: options, tables, units. It opens no store and no socket."""
