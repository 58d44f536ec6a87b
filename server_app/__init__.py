"""The edge server: a Flower ServerApp."""

from collapipe.own_packages import find_own_packages_first

find_own_packages_first()  # before this package imports others
