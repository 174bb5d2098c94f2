# Makes system calls by number that the standard library does not offer, or not so: sockets, programs, memory files, queues, timers, signals, scheduling, clocks and limits of others. RIGHT: denied
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


_ROOM = ctypes.create_string_buffer(4096)
_ONES = ctypes.create_string_buffer(b'\xff' * 8)


ACTS = (
    ('socket', lambda: call(41, 198, 1, 1, 0)),
    ('socketpair', lambda: call(53, 199, 1, 1, 0, ctypes.addressof(_ROOM))),
    ('connect', lambda: call(42, 203, 10, ctypes.addressof(_ROOM), 16)),
    ('bind', lambda: call(49, 200, 10, ctypes.addressof(_ROOM), 2)),
    ('listen', lambda: call(50, 201, 10, 1)),
    ('accept4', lambda: call(288, 242, 10, 0, 0, 0)),
    ('sendmsg', lambda: call(46, 211, 10, ctypes.addressof(_ROOM), 0)),
    ('recvmsg', lambda: call(47, 212, 10, ctypes.addressof(_ROOM), 0)),
    ('setsockopt', lambda: call(54, 208, 10, 1, 16, ctypes.addressof(_ROOM), 4)),
    ('execve', lambda: call(59, 221, ctypes.addressof(_ROOM), 0, 0)),
    ('execveat', lambda: call(322, 281, -100, ctypes.addressof(_ROOM), 0, 0, 0)),
    ('memfd_create', lambda: call(319, 279, ctypes.addressof(_ROOM), 0)),
    ('memfd_secret', lambda: call(447, 447, 0)),
    ('shmget', lambda: call(29, 194, 0, 4096, 896)),
    ('msgget', lambda: call(68, 186, 0, 896)),
    ('semget', lambda: call(64, 190, 0, 1, 896)),
    ('mq_open', lambda: call(240, 180, ctypes.addressof(_ROOM), 66, 384, 0)),
    ('pidfd_open', lambda: call(434, 434, os.getppid(), 0)),
    ('pidfd_send_signal', lambda: call(424, 424, 0, 0, 0, 0)),
    ('tkill', lambda: call(200, 130, os.getppid(), 0)),
    ('rt_sigqueueinfo', lambda: call(129, 138, os.getppid(), 0, ctypes.addressof(_ROOM))),
    ('rt_tgsigqueueinfo', lambda: call(297, 240, os.getppid(), os.getppid(), 0, ctypes.addressof(_ROOM))),
    ('kill 0', lambda: call(62, 129, 0, 0)),
    ('kill -1 with 0', lambda: call(62, 129, -1, 0)),
    ('kill own group', lambda: call(62, 129, -os.getpid(), 0)),
    ('timer_create', lambda: call(222, 107, 0, 0, ctypes.addressof(_ROOM))),
    ('timerfd_create', lambda: call(283, 85, 1, 0)),
    ('eventfd2', lambda: call(290, 19, 0, 0)),
    ('epoll_create1', lambda: call(291, 20, 0)),
    ('inotify_init1', lambda: call(294, 26, 0)),
    ('fanotify_init', lambda: call(300, 262, 0, 0)),
    ('signalfd4', lambda: call(289, 74, -1, ctypes.addressof(_ROOM), 8, 0)),
    ('pipe2', lambda: call(293, 59, ctypes.addressof(_ROOM), 0)),
    ('dup', lambda: call(32, 23, 10)),
    ('splice', lambda: call(275, 76, 0, 0, 1, 0, 1, 0)),
    ('sendfile', lambda: call(40, 71, 1, 0, 0, 1)),
    ('copy_file_range', lambda: call(326, 285, 0, 0, 1, 0, 1, 0)),
    ('prctl name', lambda: call(157, 167, 15, ctypes.addressof(_ROOM), 0, 0, 0)),
    ('prctl dumpable', lambda: call(157, 167, 4, 1, 0, 0, 0)),
    ('prctl subreaper', lambda: call(157, 167, 36, 1, 0, 0, 0)),
    ('prctl parent death', lambda: call(157, 167, 1, 0, 0, 0, 0)),
    ('seccomp', lambda: call(317, 277, 2, 0, ctypes.addressof(_ROOM))),
    ('landlock', lambda: call(444, 444, 0, 0, 1)),
    ('setsid', lambda: call(112, 157)),
    ('setpgid', lambda: call(109, 154, 0, 0)),
    ('setuid', lambda: call(105, 146, 0)),
    ('setresuid', lambda: call(117, 147, 0, 0, 0)),
    ('setgroups', lambda: call(116, 159, 0, 0)),
    ('capset', lambda: call(126, 91, ctypes.addressof(_ROOM), 0)),
    ('personality', lambda: call(135, 92, 4294967295)),
    ('sched_setscheduler', lambda: call(144, 119, 0, 0, ctypes.addressof(_ROOM))),
    ('sched_setattr', lambda: call(314, 274, 0, ctypes.addressof(_ROOM), 0)),
    ('setpriority', lambda: call(141, 140, 0, 0, 19)),
    ('ioprio_set', lambda: call(251, 30, 1, 0, 0)),
    ('sched_setaffinity', lambda: call(203, 122, 0, 8, ctypes.addressof(_ONES))),
    ('mlock', lambda: call(149, 228, ctypes.addressof(_ROOM), 4096)),
    ('mlockall', lambda: call(151, 230, 1)),
    ('mbind', lambda: call(237, 235, ctypes.addressof(_ROOM), 4096, 0, 0, 0, 0)),
    ('mincore', lambda: call(27, 232, 0, 0, ctypes.addressof(_ROOM))),
    ('process_madvise', lambda: call(440, 440, 0, 0, 0, 4, 0)),
    ('pkey_alloc', lambda: call(330, 289, 0, 0)),
    ('sync', lambda: call(162, 81)),
    ('fsync', lambda: call(74, 82, 0)),
    ('fallocate', lambda: call(285, 47, 0, 0, 0, 1)),
    ('flock', lambda: call(73, 32, 0, 2)),
    ('syslog', lambda: call(103, 116, 10, 0, 0)),
    ('sethostname', lambda: call(170, 161, ctypes.addressof(_ROOM), 0)),
    ('settimeofday', lambda: call(164, 170, ctypes.addressof(_ROOM), 0)),
    ('clock_settime', lambda: call(227, 112, 0, ctypes.addressof(_ROOM))),
    ('adjtimex', lambda: call(159, 171, ctypes.addressof(_ROOM))),
    ('membarrier', lambda: call(324, 283, 0, 0, 0)),
    ('rseq', lambda: call(334, 293, ctypes.addressof(_ROOM), 32, 0, 1)),
    ('set_robust_list', lambda: call(273, 99, ctypes.addressof(_ROOM), 24)),
    ('io_setup', lambda: call(206, 0, 1, ctypes.addressof(_ROOM))),
    ('userspace module', lambda: call(179999, 179999)),
    ('umask', lambda: call(95, 166, 0)),
    ('getcwd of a file', lambda: call(80, 49, ctypes.addressof(_ROOM))),
    ('prlimit of parent', lambda: call(302, 261, os.getppid(), 7, 0, ctypes.addressof(_ROOM))),
    ('cpu clock of parent', lambda: call(228, 113, (~os.getppid() << 3) | 2, ctypes.addressof(_ROOM))),
    ('group of parent', lambda: call(121, 155, os.getppid())),
    ('session of parent', lambda: call(124, 156, os.getppid())),
    ('affinity of parent', lambda: call(204, 123, os.getppid(), 8, ctypes.addressof(_ROOM))),
    ('priority of parent', lambda: call(140, 141, 0, os.getppid())),
)


class RawCallsEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        out = [attempt(label, act) for label, act in ACTS]
        return " | ".join(out), 0.0, False, False, {}
