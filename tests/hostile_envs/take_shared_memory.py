# Takes memory that its limits do not count: huge pages, locked pages, merged pages, System V segments. RIGHT: denied
import ctypes, mmap, os, resource

def attempt(label, act):
    try:
        result = act()
        return f"PWNED {label}: {str(result)[:60]}"
    except BaseException as error:
        return f"blocked {label}: {type(error).__name__}"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(x86_64, aarch64, *arguments):
    number = aarch64 if os.uname().machine == "aarch64" else x86_64
    result = _libc.syscall(*(ctypes.c_long(value) for value in (number, *arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


_ROOM = ctypes.create_string_buffer(8192)


def _shared():
    import multiprocessing.shared_memory

    return multiprocessing.shared_memory.SharedMemory(create=True, size=4096)


class TakeSharedMemoryEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        out = [
            attempt('huge pages', lambda: mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)),
            attempt('merge', lambda: mmap.mmap(-1, 1 << 20).madvise(12)),
            attempt('poison', lambda: mmap.mmap(-1, 4096).madvise(100)),
            attempt('offline', lambda: mmap.mmap(-1, 4096).madvise(101)),
            attempt('lock', lambda: call(149, 228, ctypes.addressof(_ROOM), 4096)),
            attempt('lock on fault', lambda: call(325, 284, ctypes.addressof(_ROOM), 4096, 1)),
            attempt('more than its limit', lambda: mmap.mmap(-1, 1 << 30)),
            attempt('grow the heap', lambda: call(25, 216, ctypes.addressof(_ROOM) & ~4095, 4096, 1 << 30, 1)),
            attempt('System V', lambda: call(29, 194, 0, 1 << 20, 0o1600)),
            attempt('POSIX', lambda: os.open('/dev/shm/hostile_shm', os.O_CREAT | os.O_RDWR)),
            attempt('multiprocessing', lambda: _shared()),
            attempt('raise', lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))),
        ]
        return " | ".join(out), 0.0, False, False, {}
