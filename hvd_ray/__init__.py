"""Hybrid verified decoding for LLMs, on Ray."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("hvd-ray")
except PackageNotFoundError:  # a checkout on the path without an installation
    __version__ = "0+unknown"
