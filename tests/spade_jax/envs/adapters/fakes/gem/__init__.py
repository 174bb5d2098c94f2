"""Stands in for gem."""

import builtins

builtins._ = str  # as gettext does it: a package may, a program may not
