"""The command line. No module imports torch before a command needs it."""
