# Changes mode, owner, times, attributes and length of a file that everybody may write. RIGHT: denied
import ctypes, os

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


_PATH = ctypes.create_string_buffer(b'/tmp/spade_canary/weights.bin')


class ChangeMetadataEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        out = [
            attempt('chmod', lambda: os.chmod('/tmp/spade_canary/weights.bin', 0o000)),
            attempt('chown', lambda: os.chown('/tmp/spade_canary/weights.bin', os.getuid(), -1)),
            attempt('lchown', lambda: os.lchown('/tmp/spade_canary/weights.bin', -1, -1)),
            attempt('utime', lambda: os.utime('/tmp/spade_canary/weights.bin', (0, 0))),
            attempt('setxattr', lambda: os.setxattr('/tmp/spade_canary/weights.bin', 'user.x', b'1')),
            attempt('removexattr', lambda: os.removexattr('/tmp/spade_canary/weights.bin', 'user.x')),
            attempt('truncate', lambda: os.truncate('/tmp/spade_canary/weights.bin', 0)),
            attempt('fchmodat2', lambda: call(452, 452, -100, ctypes.addressof(_PATH), 0, 0)),
            attempt('chmod folder', lambda: os.chmod('/tmp/spade_canary', 0)),
            attempt('fchmod 0', lambda: os.fchmod(0, 0o600)),
            attempt('fchown 0', lambda: os.fchown(0, -1, -1)),
            attempt('futimens 0', lambda: os.utime(0, (0, 0))),
            attempt('ftruncate 0', lambda: os.ftruncate(0, 0)),
        ]
        return " | ".join(out), 0.0, False, False, {}
