# Counts processor events of other processes. RIGHT: worker_died (by SIGSYS)
import ctypes, os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(x86_64, aarch64, *arguments):
    number = aarch64 if os.uname().machine == "aarch64" else x86_64
    result = _libc.syscall(*(ctypes.c_long(value) for value in (number, *arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


_ROOM = ctypes.create_string_buffer(4096)


class CountEventsEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        return f"PWNED {call(298, 241, ctypes.addressof(_ROOM), -1, 0, -1, 0)}", 0.0, False, False, {}
