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


class RawCallsEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        out = [
            attempt('socket', lambda: call(41, 198, 1, 1, 0)),
            attempt('socketpair', lambda: call(53, 199, 1, 1, 0, ctypes.addressof(_ROOM))),
            attempt('connect', lambda: call(42, 203, 10, ctypes.addressof(_ROOM), 16)),
            attempt('bind', lambda: call(49, 200, 10, ctypes.addressof(_ROOM), 2)),
            attempt('listen', lambda: call(50, 201, 10, 1)),
            attempt('accept4', lambda: call(288, 242, 10, 0, 0, 0)),
            attempt('sendmsg', lambda: call(46, 211, 10, ctypes.addressof(_ROOM), 0)),
            attempt('recvmsg', lambda: call(47, 212, 10, ctypes.addressof(_ROOM), 0)),
            attempt('setsockopt', lambda: call(54, 208, 10, 1, 16, ctypes.addressof(_ROOM), 4)),
            attempt('execve', lambda: call(59, 221, ctypes.addressof(_ROOM), 0, 0)),
            attempt('execveat', lambda: call(322, 281, -100, ctypes.addressof(_ROOM), 0, 0, 0)),
            attempt('memfd_create', lambda: call(319, 279, ctypes.addressof(_ROOM), 0)),
            attempt('memfd_secret', lambda: call(447, 447, 0)),
            attempt('shmget', lambda: call(29, 194, 0, 4096, 896)),
            attempt('msgget', lambda: call(68, 186, 0, 896)),
            attempt('semget', lambda: call(64, 190, 0, 1, 896)),
            attempt('mq_open', lambda: call(240, 180, ctypes.addressof(_ROOM), 66, 384, 0)),
            attempt('pidfd_open', lambda: call(434, 434, os.getppid(), 0)),
            attempt('pidfd_send_signal', lambda: call(424, 424, 0, 0, 0, 0)),
            attempt('tkill', lambda: call(200, 130, os.getppid(), 0)),
            attempt('rt_sigqueueinfo', lambda: call(129, 138, os.getppid(), 0, ctypes.addressof(_ROOM))),
            attempt('rt_tgsigqueueinfo', lambda: call(297, 240, os.getppid(), os.getppid(), 0, ctypes.addressof(_ROOM))),
            attempt('kill 0', lambda: call(62, 129, 0, 0)),
            attempt('kill -1 with 0', lambda: call(62, 129, -1, 0)),
            attempt('kill own group', lambda: call(62, 129, -os.getpid(), 0)),
            attempt('timer_create', lambda: call(222, 107, 0, 0, ctypes.addressof(_ROOM))),
            attempt('timerfd_create', lambda: call(283, 85, 1, 0)),
            attempt('eventfd2', lambda: call(290, 19, 0, 0)),
            attempt('epoll_create1', lambda: call(291, 20, 0)),
            attempt('inotify_init1', lambda: call(294, 26, 0)),
            attempt('fanotify_init', lambda: call(300, 262, 0, 0)),
            attempt('signalfd4', lambda: call(289, 74, -1, ctypes.addressof(_ROOM), 8, 0)),
            attempt('pipe2', lambda: call(293, 59, ctypes.addressof(_ROOM), 0)),
            attempt('dup', lambda: call(32, 23, 10)),
            attempt('splice', lambda: call(275, 76, 0, 0, 1, 0, 1, 0)),
            attempt('sendfile', lambda: call(40, 71, 1, 0, 0, 1)),
            attempt('copy_file_range', lambda: call(326, 285, 0, 0, 1, 0, 1, 0)),
            attempt('prctl name', lambda: call(157, 167, 15, ctypes.addressof(_ROOM), 0, 0, 0)),
            attempt('prctl dumpable', lambda: call(157, 167, 4, 1, 0, 0, 0)),
            attempt('prctl subreaper', lambda: call(157, 167, 36, 1, 0, 0, 0)),
            attempt('prctl parent death', lambda: call(157, 167, 1, 0, 0, 0, 0)),
            attempt('seccomp', lambda: call(317, 277, 2, 0, ctypes.addressof(_ROOM))),
            attempt('landlock', lambda: call(444, 444, 0, 0, 1)),
            attempt('setsid', lambda: call(112, 157)),
            attempt('setpgid', lambda: call(109, 154, 0, 0)),
            attempt('setuid', lambda: call(105, 146, 0)),
            attempt('setresuid', lambda: call(117, 147, 0, 0, 0)),
            attempt('setgroups', lambda: call(116, 159, 0, 0)),
            attempt('capset', lambda: call(126, 91, ctypes.addressof(_ROOM), 0)),
            attempt('personality', lambda: call(135, 92, 4294967295)),
            attempt('sched_setscheduler', lambda: call(144, 119, 0, 0, ctypes.addressof(_ROOM))),
            attempt('sched_setattr', lambda: call(314, 274, 0, ctypes.addressof(_ROOM), 0)),
            attempt('setpriority', lambda: call(141, 140, 0, 0, 19)),
            attempt('ioprio_set', lambda: call(251, 30, 1, 0, 0)),
            attempt('sched_setaffinity', lambda: call(203, 122, 0, 8, ctypes.addressof(_ONES))),
            attempt('mlock', lambda: call(149, 228, ctypes.addressof(_ROOM), 4096)),
            attempt('mlockall', lambda: call(151, 230, 1)),
            attempt('mbind', lambda: call(237, 235, ctypes.addressof(_ROOM), 4096, 0, 0, 0, 0)),
            attempt('mincore', lambda: call(27, 232, 0, 0, ctypes.addressof(_ROOM))),
            attempt('process_madvise', lambda: call(440, 440, 0, 0, 0, 4, 0)),
            attempt('pkey_alloc', lambda: call(330, 289, 0, 0)),
            attempt('sync', lambda: call(162, 81)),
            attempt('fsync', lambda: call(74, 82, 0)),
            attempt('fallocate', lambda: call(285, 47, 0, 0, 0, 1)),
            attempt('flock', lambda: call(73, 32, 0, 2)),
            attempt('syslog', lambda: call(103, 116, 10, 0, 0)),
            attempt('sethostname', lambda: call(170, 161, ctypes.addressof(_ROOM), 0)),
            attempt('settimeofday', lambda: call(164, 170, ctypes.addressof(_ROOM), 0)),
            attempt('clock_settime', lambda: call(227, 112, 0, ctypes.addressof(_ROOM))),
            attempt('adjtimex', lambda: call(159, 171, ctypes.addressof(_ROOM))),
            attempt('membarrier', lambda: call(324, 283, 0, 0, 0)),
            attempt('rseq', lambda: call(334, 293, ctypes.addressof(_ROOM), 32, 0, 1)),
            attempt('set_robust_list', lambda: call(273, 99, ctypes.addressof(_ROOM), 24)),
            attempt('io_setup', lambda: call(206, 0, 1, ctypes.addressof(_ROOM))),
            attempt('userspace module', lambda: call(179999, 179999)),
            attempt('umask', lambda: call(95, 166, 0)),
            attempt('getcwd of a file', lambda: call(80, 49, ctypes.addressof(_ROOM))),
            attempt('prlimit of parent', lambda: call(302, 261, os.getppid(), 7, 0, ctypes.addressof(_ROOM))),
            attempt('cpu clock of parent', lambda: call(228, 113, (~os.getppid() << 3) | 2, ctypes.addressof(_ROOM))),
            attempt('group of parent', lambda: call(121, 155, os.getppid())),
            attempt('session of parent', lambda: call(124, 156, os.getppid())),
            attempt('affinity of parent', lambda: call(204, 123, os.getppid(), 8, ctypes.addressof(_ROOM))),
            attempt('priority of parent', lambda: call(140, 141, 0, os.getppid())),
        ]
        return " | ".join(out), 0.0, False, False, {}
