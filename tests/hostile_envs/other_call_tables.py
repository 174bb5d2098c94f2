# Makes calls through the 32-bit and x32 tables, whose numbers mean something else. RIGHT: worker_died (by SIGSYS)
import ctypes, mmap, os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(x86_64, aarch64, *arguments):
    number = aarch64 if os.uname().machine == "aarch64" else x86_64
    result = _libc.syscall(*(ctypes.c_long(value) for value in (number, *arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


class OtherCallTablesEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        if os.uname().machine == "x86_64" and len(action) % 2:
            # mov eax, 20 (getpid in the 32-bit table); int 0x80; ret
            code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            code.write(bytes.fromhex("b814000000cd80c3"))
            address = ctypes.addressof(ctypes.c_char.from_buffer(code))
            return f"PWNED {ctypes.CFUNCTYPE(ctypes.c_int)(address)()}", 0.0, False, False, {}
        return f"PWNED {call(0x40000000 + 39, 0x40000000 + 39)}", 0.0, False, False, {}
