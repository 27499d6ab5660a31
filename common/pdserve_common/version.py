"""The version, in one place for packages that cannot ask the installer."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("pdserve")
except PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "0+unknown"
