"""A filter of system calls for a worker: an allow-list, as a program of the kernel's classic BPF,
built here and installed through prctl. Standard library only.

What is not on the list is refused with EPERM, or with ENOSYS if it is newer than the tables, so
that a C library falls back as on an older kernel. What only an attack would call kills the process.
Numbers of x86-64 and aarch64; the calls of another architecture, 32-bit and x32 ones among them,
kill.

With `files` a worker may look at paths and open files for reading, never anything else; which files
is for Landlock to say, and the names, sizes and times of others stay visible where the user may
look. Without it no path can be used at all. Clocks are read without a system call and cannot be
filtered.
"""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

ALLOW = 0x7FFF0000
KILL = 0x80000000
_ERRNO = 0x00050000
DENY = _ERRNO | errno.EPERM
_NO_SUCH_CALL = _ERRNO | errno.ENOSYS
_NEWEST = 470  # the largest number that the tables know of; both machines share numbers from 424 on
_X32 = 0x40000000
_SELF = -1  # stands for the process id in a test; `Filter.install` fills it in
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

_LOAD, _AND, _JUMP, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_INSTRUCTION = struct.Struct("<HBBI")
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in the kernel's struct seccomp_data
_WORD = 0xFFFFFFFF  # an int argument: the kernel does not look at the upper half

Test = tuple[int, int, int]  # argument, mask, value: the argument under the mask is the value
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


@dataclass(frozen=True)
class Machine:
    """What differs between architectures."""

    audit: int  # the kernel's name of it
    column: int  # in `_NUMBERS`
    open_flags: int  # with which a file may be opened for reading
    large_file: int  # what every 64-bit open sets


# O_NONBLOCK, O_NOCTTY, O_CLOEXEC, then O_DIRECTORY, O_NOFOLLOW, O_LARGEFILE
MACHINES = {
    "x86_64": Machine(0xC000003E, 0, 0x80900 | 0x10000 | 0x20000 | 0x8000, 0x8000),
    "aarch64": Machine(0xC00000B7, 1, 0x80900 | 0x4000 | 0x8000 | 0x20000, 0x20000),
}

# Numbers on x86-64 and aarch64; - where the machine has no such call.
_NUMBERS = """
read 0 63 write 1 64 readv 19 65 writev 20 66 pread64 17 67 preadv 295 69 lseek 8 62 close 3 57
close_range 436 436 fstat 5 80 newfstatat 262 79 stat 4 - lstat 6 - statx 332 291 openat 257 56
open 2 - getdents64 217 61 getcwd 79 17 mmap 9 222 munmap 11 215 mremap 25 216 mprotect 10 226
madvise 28 233 brk 12 214 futex 202 98 rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139
rt_sigpending 127 136 rt_sigsuspend 130 133 rt_sigtimedwait 128 137 sigaltstack 131 132 pause 34 -
nanosleep 35 101 clock_nanosleep 230 115 clock_gettime 228 113 clock_getres 229 114
gettimeofday 96 169 time 201 - times 100 153 getitimer 36 102 setitimer 38 103 alarm 37 -
getpid 39 172 gettid 186 178 getppid 110 173 getuid 102 174 geteuid 107 175 getgid 104 176
getegid 108 177 getresuid 118 148 getresgid 120 150 getgroups 115 158 getpgid 121 155 getpgrp 111 -
getsid 124 156 getpriority 140 141 getrlimit 97 163 getrusage 98 165 prlimit64 302 261
sched_yield 24 124 sched_getaffinity 204 123 getcpu 309 168 sysinfo 99 179 uname 63 160
getrandom 318 278 poll 7 - ppoll 271 73 select 23 - pselect6 270 72 restart_syscall 219 128
exit 60 93 exit_group 231 94 recvfrom 45 207 sendto 44 206 shutdown 48 210 getsockname 51 204
getsockopt 55 209 fcntl 72 25 ioctl 16 29 kill 62 129 tgkill 234 131 fork 57 - vfork 58 -
clone 56 220 clone3 435 435 openat2 437 437
ptrace 101 117 process_vm_readv 310 270 process_vm_writev 311 271 kcmp 312 272 pidfd_getfd 438 438
io_uring_setup 425 425 io_uring_enter 426 426 io_uring_register 427 427 bpf 321 280
perf_event_open 298 241 userfaultfd 323 282 add_key 248 217 request_key 249 218 keyctl 250 219
unshare 272 97 setns 308 268 mount 165 40 umount2 166 39 pivot_root 155 41 chroot 161 51
open_tree 428 428 move_mount 429 429 fsopen 430 430 fsconfig 431 431 fsmount 432 432 fspick 433 433
mount_setattr 442 442 open_by_handle_at 304 265 modify_ldt 154 - iopl 172 - ioperm 173 -
init_module 175 105 finit_module 313 273 delete_module 176 106 kexec_load 246 104
kexec_file_load 320 294 reboot 169 142 swapon 167 224 swapoff 168 225 acct 163 89 quotactl 179 60
"""

_ALLOWED = """
read write readv writev lseek close close_range munmap mremap mprotect brk rt_sigaction
rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause nanosleep
gettimeofday time times getitimer setitimer alarm getpid gettid getppid getuid geteuid getgid
getegid getresuid getresgid getgroups getpgrp getrlimit getrusage sched_yield getcpu sysinfo uname
getrandom getcwd poll ppoll select pselect6 restart_syscall exit exit_group shutdown getsockname
"""

_READING = "fstat newfstatat stat lstat statx getdents64 pread64 preadv"  # allowed with `files`

_KILLED = """
ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd io_uring_setup io_uring_enter
io_uring_register bpf perf_event_open userfaultfd add_key request_key keyctl unshare setns mount
umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr
open_by_handle_at modify_ldt iopl ioperm init_module finit_module delete_module kexec_load
kexec_file_load reboot swapon swapoff acct quotactl
"""

_ANSWERED = {
    "fork": errno.EAGAIN,  # as if there were too many processes
    "vfork": errno.EAGAIN,
    "clone": errno.EAGAIN,
    "clone3": errno.ENOSYS,  # its arguments lie in memory; a C library then tries `clone`
    "openat2": errno.ENOSYS,
    "ioctl": errno.ENOTTY,  # nothing is a terminal
}


def _conditions(machine: Machine, files: bool) -> dict[str, tuple[tuple[Test, ...], ...]]:
    """Calls that are allowed if all tests of one of their clauses hold."""
    no_flags, own_clock = (3, _WORD, 0), (0, 0xFFFFFFF0, 0)  # others' clocks are negative
    fcntl_flags = 0x803 | machine.large_file  # no O_ASYNC: it makes the kernel send signals
    # WAIT, WAKE and their BITSET forms: Python's locks
    futex = tuple(((1, _WORD & ~0x180, operation),) for operation in (0, 1, 9, 10))
    found: dict[str, tuple[tuple[Test, ...], ...]] = {
        # MAP_HUGETLB takes from a reserve that is no worker's
        "mmap": (((3, 0x40000, 0),),),
        # DONTNEED, FREE, HUGEPAGE
        "madvise": tuple(((2, _WORD, advice),) for advice in (4, 8, 14)),
        "futex": futex,
        "clock_gettime": ((own_clock,),),
        "clock_getres": ((own_clock,),),
        "clock_nanosleep": ((own_clock,),),
        "getpgid": (((0, _WORD, 0),),),
        "getsid": (((0, _WORD, 0),),),
        "getpriority": (((1, _WORD, 0),),),
        "sched_getaffinity": (((0, _WORD, 0),),),
        "prlimit64": (((0, _WORD, 0), (2, 2**64 - 1, 0)),),  # its own, and no new value
        "kill": (((0, _WORD, _SELF),),),
        "tgkill": (((0, _WORD, _SELF),),),
        # The channel is a socket. No flags: urgent bytes have been a way into the kernel; no
        # address.
        "recvfrom": ((no_flags,),),
        "sendto": ((no_flags, (4, 2**64 - 1, 0)),),
        # SO_TYPE, SO_PROTOCOL, SO_DOMAIN of SOL_SOCKET
        "getsockopt": tuple(((1, _WORD, 1), (2, _WORD, name)) for name in (3, 38, 39)),
        # F_GETFD, F_SETFD, F_GETFL, F_SETFL
        "fcntl": (
            *(((1, _WORD, command),) for command in (1, 2, 3)),
            ((1, _WORD, 4), (2, _WORD & ~fcntl_flags, 0)),
        ),
    }
    if files:
        refused = _WORD & ~machine.open_flags
        found["openat"] = (((2, refused, 0),),)
        found["open"] = (((1, refused, 0),),)
    return found


def numbers(machine: str) -> dict[str, int]:
    """The system calls that the filter names, with their numbers on a machine."""
    words = _NUMBERS.split()
    column = words[1 + MACHINES[machine].column :: 3]
    return {name: int(text) for name, text in zip(words[::3], column, strict=True) if text != "-"}


class Filter:
    """A program for the kernel, but for the id of the process that installs it."""

    def __init__(self, code: bytes, self_offsets: Sequence[int]) -> None:
        """`self_offsets` is where the process id goes."""
        self._buffer = ctypes.create_string_buffer(code, len(code))
        self._self_offsets = self_offsets
        self._program = _Program(len(code) // _INSTRUCTION.size, ctypes.addressof(self._buffer))

    def instructions(self, pid: int) -> bytes:
        """The program for process `pid`."""
        for offset in self._self_offsets:
            struct.pack_into("<I", self._buffer, offset, pid)
        return self._buffer.raw

    def install(self) -> None:
        """Put this process under the filter, for good. It needs no_new_privs.

        Raises:
            OSError: the kernel refuses.
        """
        self.instructions(os.getpid())
        if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self._program), 0, 0):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


_libc = ctypes.CDLL(None, use_errno=True)


def build(machine: str, *, files: bool) -> Filter:
    """The filter of a worker on `machine`, a key of `MACHINES`.

    Raises:
        OSError: there is no table for the machine.
    """
    if machine not in MACHINES or sys.maxsize < 2**32:
        bits = 64 if sys.maxsize > 2**32 else 32
        raise OSError(errno.ENOSYS, f"no table of system calls for {bits}-bit Python on {machine}")
    about, table = MACHINES[machine], numbers(machine)
    leaves = {number: [_returned(DENY)] for number in range(_NEWEST + 1)}
    for names, action in ((_ALLOWED, ALLOW), (_READING if files else "", ALLOW), (_KILLED, KILL)):
        leaves.update({table[n]: [_returned(action)] for n in names.split() if n in table})
    leaves.update({table[n]: [_returned(_ERRNO | e)] for n, e in _ANSWERED.items() if n in table})
    conditions = _conditions(about, files)
    leaves.update({table[n]: _tested(c) for n, c in conditions.items() if n in table})
    leaves[_NEWEST + 1] = [_returned(_NO_SUCH_CALL)]
    leaves[_X32] = [_returned(KILL)]
    return _assembled(
        [
            (_LOAD, 0, 0, _ARCHITECTURE),
            (_JUMP_EQUAL, 1, 0, about.audit),
            _returned(KILL),
            (_LOAD, 0, 0, _NUMBER),
            *_searched(_segments(leaves)),
        ]
    )


def _returned(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _tested(clauses: tuple[tuple[Test, ...], ...]) -> list[Instruction]:
    """Allow if all tests of one clause hold, else deny."""
    code: list[Instruction] = []
    for clause in clauses:
        checks: list[list[Instruction]] = []
        for argument, mask, value in clause:
            for half in (0, 1):
                if part := mask >> 32 * half & _WORD:
                    wanted = value if value == _SELF else value >> 32 * half & _WORD
                    load = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4 * half)]
                    keep = [] if part == _WORD else [(_AND, 0, 0, part)]
                    checks.append([*load, *keep, (_JUMP_EQUAL, 0, 0, wanted)])
        flat = [instruction for check in checks for instruction in check]
        for index, (operation, _, _, constant) in enumerate(flat):
            # A test that fails goes on after the return at the end of the clause.
            other = len(flat) - index if operation == _JUMP_EQUAL else 0
            code.append((operation, 0, other, constant))
        code.append(_returned(ALLOW))
    return [*code, _returned(DENY)]


def _segments(
    leaves: dict[int, list[Instruction]],
) -> list[tuple[int, list[Instruction]]]:
    """First number and what to do of each run of numbers with the same answer."""
    found: list[tuple[int, list[Instruction]]] = []
    for number in sorted(leaves):
        if not found or found[-1][1] != leaves[number]:
            found.append((number, leaves[number]))
    return found


def _searched(segments: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """A binary search: the kernel runs the filter once for every number when it is installed."""
    if len(segments) == 1:
        return segments[0][1]
    middle = len(segments) // 2
    below, above = _searched(segments[:middle]), _searched(segments[middle:])
    return [
        (_JUMP_AT_LEAST, 0, 1, segments[middle][0]),
        (_JUMP, 0, 0, len(below)),  # the offset of a conditional jump is one byte
        *below,
        *above,
    ]


def _assembled(code: list[Instruction]) -> Filter:
    offsets = tuple(
        index * _INSTRUCTION.size + 4
        for index, (operation, _, _, constant) in enumerate(code)
        if operation == _JUMP_EQUAL and constant == _SELF
    )
    packed = (_INSTRUCTION.pack(*fields[:3], fields[3] & _WORD) for fields in code)
    return Filter(b"".join(packed), offsets)
