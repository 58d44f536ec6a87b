"""A control unit: a Flower ClientApp."""

from collapipe.own_packages import import_own_packages

import_own_packages()  # before this package imports others
