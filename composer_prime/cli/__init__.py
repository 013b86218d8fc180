"""`composer-prime`, the command line: one small module a group, no logic of its own."""
