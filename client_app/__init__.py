"""A control unit: a Flower ClientApp."""

from collapipe.own_packages import find_own_packages_first

find_own_packages_first()  # before this package imports others
