# Touches one page in each of very many far regions, so that the kernel's tables outgrow the memory that its limit counts. RIGHT: denied|timeout|env_error|worker_died
import ctypes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class FillPageTablesEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        for count in range(1_000_000):
            address = _libc.mmap(0x10_0000_0000 + (count << 30), 4096, 3, 0x22, -1, 0)
            if address in (None, 2**64 - 1):
                return f"blocked after {count} regions", 0.0, False, False, {}
            ctypes.c_char.from_address(address).value = b"x"
        return f"PWNED {count} regions", 0.0, False, False, {}
