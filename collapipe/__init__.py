"""CollaPipe: training Transformers together on clusters of heterogeneous edge devices."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("collapipe")
except PackageNotFoundError:  # inside a Flower bundle, which is unpacked and not installed
    __version__ = "0+bundle"
