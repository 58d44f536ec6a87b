"""``python -m collapipe`` runs the command ``collapipe``."""

from collapipe.cli.app import main

main()
