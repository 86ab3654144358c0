"""One module a command. None imports torch before the command runs."""
