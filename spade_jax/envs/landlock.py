"""Landlock: what of the file system, the network and other processes a worker may reach. Standard
library only.

`ruleset` makes a set of rules once, in the zygote; `restrict` puts a worker under it. Every right
that the kernel's version (ABI) of Landlock knows is handled, so what no rule gives is refused:
writing, making, removing and renaming anywhere, reading outside the folders given, TCP, and signals
and abstract sockets to the outside. Landlock does not know of chmod, chown, utime, stat, UDP or
file descriptors that are open already: those are for `seccomp` and `limits`.
"""

import contextlib
import ctypes
import errno
import os
import re
import struct
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ANY_ABI = 99  # no cut
_CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_GET_VERSION = 1
_NO_LOG, _FIRST_ABI_WITH_LOG = 1, 7
_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# The number of file rights, network rights and scopes that each ABI knows, from 1 on.
_KNOWN = ((13, 0, 0), (14, 0, 0), (15, 0, 0), (15, 2, 0), (16, 2, 0), (16, 2, 2))
_ZONES = "/usr/share/zoneinfo"
_LIBRARY_CACHE = "/etc/ld.so.cache"  # a list of shared libraries

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def abi() -> int:
    """The kernel's version of Landlock.

    Raises:
        OSError: it has none (ENOSYS), or it is turned off (EOPNOTSUPP).
    """
    return _call(_CREATE, None, 0, _GET_VERSION)


def library_paths() -> list[str]:
    """Where this interpreter finds what it may still have to import or load: its own library, the
    packages installed for it, the system's shared libraries, and time zones."""
    places = sysconfig.get_paths()
    found = [places[name] for name in ("stdlib", "purelib", "platlib")]
    found += [path for path in sys.path if path.endswith(("lib-dynload", ".zip"))]
    found += [os.path.join(sys.base_prefix, "lib"), _ZONES, _LIBRARY_CACHE]
    with contextlib.suppress(OSError):  # without /proc, what is loaded is all there is
        maps = Path("/proc/self/maps").read_text()
        found += [os.path.dirname(path) for path in re.findall(r"/\S+/libc[.-]\S+", maps)]
    real = {os.path.realpath(path) for path in found}
    return sorted(path for path in real if path != "/" and os.path.exists(path))


def ruleset(paths: Iterable[str], max_abi: int = ANY_ABI) -> int:
    """A descriptor of rules that allow reading below `paths` and nothing else. What is not there is
    left out.

    Raises:
        OSError: the kernel refuses.
    """
    known = min(abi(), max_abi)
    if known < 1:
        raise OSError(errno.ENOSYS, "Landlock is turned off")
    files, network, scopes = ((1 << count) - 1 for count in _KNOWN[min(known, len(_KNOWN)) - 1])
    handled = struct.pack("<QQQ", files, network, scopes)
    # An older kernel takes a longer structure only if the rest of it is zero, which it is.
    rules = _call(_CREATE, handled, len(handled), 0)
    try:
        for path in paths:
            _allow_reading(rules, path)
    except OSError:
        os.close(rules)
        raise
    return rules


def restrict(rules: int) -> None:
    """Put this process under the rules, for good. It needs no_new_privs.

    Refusals stay out of the host's audit log, where kernels keep one: it could be flooded.

    Raises:
        OSError: the kernel refuses.
    """
    _call(_RESTRICT_SELF, rules, _NO_LOG if abi() >= _FIRST_ABI_WITH_LOG else 0)


def _allow_reading(rules: int, path: str) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
        _call(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("<Qi", rights, place), 0)
    finally:
        os.close(place)


def _call(number: int, *arguments: int | bytes | None) -> int:
    full = (
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    )
    result = _libc.syscall(ctypes.c_long(number), *full)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"landlock: {os.strerror(error)}")
    return result
