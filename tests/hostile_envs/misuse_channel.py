# Uses the channel as the socket it is: urgent bytes, descriptors, addresses, options, signals on arrival. RIGHT: denied
import ctypes, fcntl, os, socket, struct

def attempt(label, act):
    try:
        result = act()
        return f"PWNED {label}: {str(result)[:60]}"
    except BaseException as error:
        return f"blocked {label}: {type(error).__name__}"


_KEPT = []


def _channel():
    if not _KEPT:
        _KEPT.append(socket.socket(fileno=10))
    return _KEPT[0]


class MisuseChannelEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        out = [
            attempt('urgent', lambda: _channel().send(b'x', socket.MSG_OOB)),
            attempt('peek', lambda: _channel().recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)),
            attempt('send a descriptor', lambda: socket.send_fds(_channel(), [b'x'], [0])),
            attempt('receive descriptors', lambda: socket.recv_fds(_channel(), 1, 1)),
            attempt('send to', lambda: _channel().sendto(b'x', '/tmp/spade_canary/socket')),
            attempt('connect', lambda: _channel().connect('/tmp/spade_canary/socket')),
            attempt('peer', lambda: struct.unpack('3i', _channel().getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))),
            attempt('descriptor of the peer', lambda: _channel().getsockopt(socket.SOL_SOCKET, 77, 4)),
            attempt('buffer', lambda: _channel().setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)),
            attempt('credentials', lambda: _channel().setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)),
            attempt('owner', lambda: fcntl.fcntl(10, fcntl.F_SETOWN, os.getppid())),
            attempt('signal', lambda: fcntl.fcntl(10, 10, 9)),
            attempt('asynchronous', lambda: fcntl.fcntl(10, fcntl.F_SETFL, os.O_ASYNC)),
            attempt('lease', lambda: fcntl.fcntl(0, fcntl.F_SETLEASE, fcntl.F_RDLCK)),
            attempt('copy', lambda: fcntl.fcntl(10, fcntl.F_DUPFD, 20)),
            attempt('lock', lambda: fcntl.lockf(0, fcntl.LOCK_EX | fcntl.LOCK_NB)),
            attempt('ioctl FIOASYNC', lambda: fcntl.ioctl(10, 0x5452, struct.pack('i', 1))),
            attempt('ioctl TIOCSTI', lambda: fcntl.ioctl(0, 0x5412, b'x')),
            attempt('dup2', lambda: os.dup2(10, 20)),
        ]
        _KEPT.pop().detach()  # collected, it would close the channel
        return " | ".join(out), 0.0, False, False, {}
