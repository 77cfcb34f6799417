"""What is found in :mod:`flagscale` when it is first used, for those who check types."""

from flagscale.api import Run as Run
from flagscale.api import find as find
from flagscale.api import launch as launch
from flagscale.api import plan as plan

__version__: str
