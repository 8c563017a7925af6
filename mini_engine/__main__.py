"""`python -m mini_engine` is the command line."""

from mini_engine.cli import main

main()
