"""`python -m minizero` is the command line."""

from minizero.cli import main

main()
