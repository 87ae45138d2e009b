"""The command line. Each module is a command; none imports torch before it has to."""
