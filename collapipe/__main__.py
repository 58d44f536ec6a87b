"""``python -m collapipe``: the command without its script."""

from collapipe.cli.app import main

main()
