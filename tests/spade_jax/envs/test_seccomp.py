"""The filter, run by an interpreter of the kernel's BPF for both machines: one of them is not here.

The numbers below are the kernel's, written down a second time.
"""

import errno
import os
import struct

import pytest

from spade_jax.envs import seccomp
from spade_jax.envs.seccomp import ALLOW, DENY, KILL, MACHINES

PID = 4321
ERRNO = 0x00050000
X86, ARM = 0xC000003E, 0xC00000B7
AUDIT = {"x86_64": X86, "aarch64": ARM}


def interpret(code: bytes, number: int, arguments: tuple[int, ...], audit: int) -> int:
    """What the kernel would answer to a call: classic BPF over its struct seccomp_data."""
    padded = [value & 2**64 - 1 for value in arguments] + [0] * (6 - len(arguments))
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, audit, 0x7F0000001234, *padded)
    program = [struct.unpack_from("<HBBI", code, at) for at in range(0, len(code), 8)]
    accumulator, at = 0, 0
    while True:
        operation, true, false, constant = program[at]
        at += 1
        if operation == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif operation == 0x54:
            accumulator &= constant
        elif operation == 0x05:
            at += constant
        elif operation == 0x15:
            at += true if accumulator == constant else false
        elif operation == 0x35:
            at += true if accumulator >= constant else false
        elif operation == 0x06:
            return constant
        else:
            raise AssertionError(f"instruction {operation:#x}")


@pytest.fixture(scope="module", params=[(m, f) for m in MACHINES for f in (True, False)], ids=str)
def filtered(request):
    """A function: the answer to a call by number, for one machine, with files or without."""
    machine, files = request.param
    code = seccomp.build(machine, files=files).instructions(PID)

    def answer(number: int, *arguments: int, audit: int = AUDIT[machine]) -> int:
        return interpret(code, number, arguments, audit)

    answer.machine, answer.files, answer.code = machine, files, code
    return answer


def pick(filtered, x86_64: int, aarch64: int) -> int:
    return x86_64 if filtered.machine == "x86_64" else aarch64


def test_every_path_ends_within_the_program(filtered):
    """As the kernel's own check: jumps go forward and stay inside, the last one returns."""
    program = [
        struct.unpack_from("<HBBI", filtered.code, at) for at in range(0, len(filtered.code), 8)
    ]
    assert len(program) <= 4096
    assert program[-1][0] == 0x06
    for at, (operation, true, false, constant) in enumerate(program):
        assert operation in (0x20, 0x54, 0x05, 0x15, 0x35, 0x06)
        if operation == 0x05:
            assert at + 1 + constant < len(program)
        elif operation in (0x15, 0x35):
            assert at + 1 + max(true, false) < len(program)
        elif operation == 0x20:
            assert constant % 4 == 0
            assert 0 <= constant < 64


def test_another_architecture_is_killed(filtered):
    other = ARM if filtered.machine == "x86_64" else X86
    for audit in (other, 0x40000003, 0x40000028, 0):  # 32-bit x86 and ARM
        assert filtered(pick(filtered, 0, 63), audit=audit) == KILL


def test_numbers_that_no_table_has(filtered):
    assert filtered(0x40000000) == KILL  # x32
    assert filtered(0x40000000 + 39) == KILL
    assert filtered(-1) == KILL
    assert filtered(10_000) == ERRNO | errno.ENOSYS
    assert filtered(471) == ERRNO | errno.ENOSYS
    assert filtered(470) == DENY
    assert filtered(461) == DENY


ALLOWED = {  # read write close mmap munmap brk mprotect exit exit_group getpid getrandom poll
    "x86_64": (0, 1, 3, 9, 11, 12, 10, 60, 231, 39, 318, 7, 13, 14, 15, 35, 38),
    "aarch64": (63, 64, 57, 222, 215, 214, 226, 93, 94, 172, 278, 73, 134, 135, 139, 101, 103),
}
REFUSED = {
    # sockets and messages, programs, modes and owners, names, memory files, segments, queues,
    # signals, timers, watches, pipes, copies, prctl and its like, users, scheduling, locking, hosts
    "x86_64": (
        *(41, 42, 43, 46, 47, 49, 50, 53, 54, 288, 299, 307), *(59, 322),
        *(90, 91, 92, 93, 94, 268, 260, 452), *(80, 81, 82, 83, 84, 85, 86, 87, 88, 133, 263, 316),
        *(76, 77, 132, 188, 189, 190, 235, 280, 285), *(319, 447, 29, 30, 31, 64, 68, 240),
        *(200, 129, 297, 424, 434, 222, 283, 290, 291, 294, 300, 289), *(22, 293, 32, 33, 292),
        *(40, 275, 276, 278, 326), *(157, 158, 160, 317, 444, 446, 135, 126, 109, 112),
        *(105, 106, 113, 116, 117, 119, 122, 123), *(141, 142, 144, 203, 314, 251, 149, 151, 237),
        *(21, 89, 267, 269, 439), *(162, 74, 73, 103, 170, 164, 227, 159, 95, 206, 27, 324, 334),
    ),
    "aarch64": (
        *(198, 203, 202, 211, 212, 200, 201, 199, 208, 242, 269, 243), *(221, 281),
        *(52, 53, 54, 55, 452), *(49, 50, 34, 35, 36, 37, 38, 276, 33), *(45, 46, 5, 6, 7, 88, 47),
        *(279, 447, 194, 196, 195, 190, 186, 180), *(130, 138, 240, 424, 434, 107, 85, 19, 20, 26),
        *(262, 74), *(59, 23, 24), *(71, 76, 75, 77, 285),
        *(167, 164, 277, 444, 446, 92, 91, 154, 157), *(146, 144, 145, 143, 147, 149, 151, 159),
        *(140, 118, 119, 122, 274, 30, 228, 230, 235), *(78, 48, 439),
        *(81, 82, 32, 116, 161, 170, 112, 171, 166, 0, 232, 283, 293),
    ),
}  # fmt: skip
KILLED = {  # ptrace process_vm_* io_uring_* bpf userfaultfd keys unshare setns mounting modules
    "x86_64": (
        *(101, 310, 311, 425, 426, 427, 321, 323, 248, 249, 250, 272, 308, 165, 166, 155, 161, 304),
        *(428, 429, 430, 431, 432, 433, 442, 298, 312, 438, 172, 173, 154, 175, 313, 246, 320, 169),
    ),
    "aarch64": (
        *(117, 270, 271, 425, 426, 427, 280, 282, 217, 218, 219, 97, 268, 40, 39, 41, 51, 265),
        *(428, 429, 430, 431, 432, 433, 442, 241, 272, 438, 105, 273, 104, 294, 142),
    ),
}  # fmt: skip


def test_what_is_allowed(filtered):
    for number in ALLOWED[filtered.machine]:
        assert filtered(number) == ALLOW, number


@pytest.mark.parametrize("word", [0, 1, PID, 2**64 - 1])
def test_what_is_refused_whatever_the_arguments(filtered, word: int):
    for number in REFUSED[filtered.machine]:
        assert filtered(number, *[word] * 6) == DENY, number
    for number in KILLED[filtered.machine]:
        assert filtered(number, *[word] * 6) == KILL, number


def test_how_much_is_allowed(filtered):
    """A new entry of the list is a decision: these counts change with it."""
    answers = [filtered(number, *[1 << 40] * 6) for number in range(471)]
    counts = {answer: answers.count(answer) for answer in set(answers)}
    expected = {
        ("x86_64", True): {ALLOW: 74, KILL: 41},
        ("x86_64", False): {ALLOW: 64, KILL: 41},
        ("aarch64", True): {ALLOW: 65, KILL: 38},
        ("aarch64", False): {ALLOW: 58, KILL: 38},
    }[filtered.machine, filtered.files]
    assert {answer: counts[answer] for answer in expected} == expected


def test_new_processes_and_terminals(filtered):
    again = ERRNO | errno.EAGAIN
    assert filtered(pick(filtered, 56, 220), 17) == again  # clone
    if filtered.machine == "x86_64":
        assert filtered(57) == filtered(58) == again  # fork, vfork
    assert filtered(435) == ERRNO | errno.ENOSYS  # clone3
    assert filtered(437) == ERRNO | errno.ENOSYS  # openat2
    assert filtered(pick(filtered, 16, 29), 0, 0x5412) == ERRNO | errno.ENOTTY  # ioctl


def test_signals_go_to_itself_only(filtered):
    for number in (pick(filtered, 62, 129), pick(filtered, 234, 131)):  # kill, tgkill
        assert filtered(number, PID, PID, 9) == ALLOW
        assert filtered(number, PID | 5 << 32, PID, 9) == ALLOW  # the kernel reads an int
        for other in (PID + 1, 0, -1, -PID, 1, 2**32 - PID):
            assert filtered(number, other, PID, 0) == DENY


def test_files_are_opened_for_reading_only(filtered):
    number = pick(filtered, 257, 56)
    directory, no_follow, large = (
        (0x10000, 0x20000, 0x8000) if filtered.machine == "x86_64" else (0x4000, 0x8000, 0x20000)
    )
    reading = ALLOW if filtered.files else DENY
    for flags in (0, 0x80000, directory, 0x80000 | directory | large | no_follow | 0x800 | 0x100):
        assert filtered(number, -100, 0x1000, flags) == reading
    for bit in range(32):
        if not 1 << bit & (0x80900 | directory | no_follow | large):
            assert filtered(number, -100, 0x1000, 1 << bit) == DENY, hex(1 << bit)
    for call in (pick(filtered, 262, 79), pick(filtered, 332, 291), pick(filtered, 217, 61)):
        assert filtered(call, -100, 0x1000) == reading  # newfstatat, statx, getdents64
    if filtered.machine == "x86_64":
        assert filtered(2, 0x1000, 0x80000) == reading
        assert filtered(2, 0x1000, 0x241) == DENY


def test_the_channel_carries_bytes_only(filtered):
    send, receive, option, control = (
        (44, 45, 55, 72) if filtered.machine == "x86_64" else (206, 207, 209, 25)
    )
    assert filtered(send, 10, 0x1000, 5, 0, 0, 0) == ALLOW
    assert filtered(send, 10, 0x1000, 5, 1, 0, 0) == DENY  # MSG_OOB
    assert filtered(send, 10, 0x1000, 5, 0, 0x1000, 16) == DENY
    assert filtered(send, 10, 0x1000, 5, 0, 1 << 40, 16) == DENY
    assert filtered(receive, 10, 0x1000, 5, 0) == ALLOW
    assert filtered(receive, 10, 0x1000, 5, 1) == DENY
    assert filtered(option, 10, 1, 3) == filtered(option, 10, 1, 38) == ALLOW
    assert filtered(option, 10, 1, 17) == filtered(option, 10, 1, 77) == DENY  # SO_PEERCRED, PIDFD
    assert filtered(option, 10, 6, 3) == DENY
    assert filtered(control, 10, 3) == ALLOW
    assert filtered(control, 10, 4, 0x802) == ALLOW  # O_NONBLOCK
    assert filtered(control, 10, 4, 0x2000) == DENY  # O_ASYNC
    for command in (0, 5, 6, 8, 10, 15, 1024, 1030, 1031, 1033):
        assert filtered(control, 10, command, 0) == DENY


def test_limits_and_clocks_of_others(filtered):
    limit, clock, sleep, group = (
        (302, 228, 230, 121) if filtered.machine == "x86_64" else (261, 113, 115, 155)
    )
    assert filtered(limit, 0, 7, 0, 0x1000) == ALLOW
    assert filtered(limit, 0, 7, 0x1000, 0) == DENY
    assert filtered(limit, 0, 7, 1 << 40, 0) == DENY
    assert filtered(limit, PID + 1, 7, 0, 0x1000) == DENY
    for number in (clock, sleep):
        assert filtered(number, 0) == filtered(number, 7) == ALLOW
        assert filtered(number, ~PID << 3 | 2) == filtered(number, 16) == DENY
    assert filtered(group, 0) == ALLOW
    assert filtered(group, 1) == DENY


def test_memory_and_locks(filtered):
    table, advise, futex = (9, 28, 202) if filtered.machine == "x86_64" else (222, 233, 98)
    assert filtered(table, 0, 4096, 3, 0x22) == ALLOW
    assert filtered(table, 0, 4096, 3, 0x40022) == DENY  # huge pages
    for advice in range(120):
        assert filtered(advise, 0x1000, 4096, advice) == (ALLOW if advice in (4, 8, 14) else DENY)
    for operation in range(16):
        expected = ALLOW if operation in (0, 1, 9, 10) else DENY
        assert filtered(futex, 0x1000, operation) == expected
        assert filtered(futex, 0x1000, operation | 0x180) == expected


def test_no_call_has_two_numbers_or_rules():
    for machine in MACHINES:
        numbers = seccomp.numbers(machine)
        assert len(set(numbers.values())) == len(numbers)
        assert max(numbers.values()) <= seccomp._NEWEST
    groups = [
        seccomp._ALLOWED.split(),
        seccomp._READING.split(),
        seccomp._KILLED.split(),
        [*seccomp._ANSWERED],
        [*seccomp._conditions(MACHINES["x86_64"], True)],
    ]
    names = [name for group in groups for name in group]
    assert len(names) == len(set(names))
    assert set(names) == set().union(*(seccomp.numbers(machine) for machine in MACHINES))


def test_a_machine_without_a_table_is_named():
    with pytest.raises(OSError, match="riscv64") as raised:
        seccomp.build("riscv64", files=True)
    assert raised.value.errno == errno.ENOSYS


def test_this_machine_has_a_table():
    assert os.uname().machine in MACHINES
