"""`python -m octavo` is `octavo`."""

from octavo.lab.cli.main import main

main()
