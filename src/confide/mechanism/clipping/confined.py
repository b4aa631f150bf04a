"""What a process of its own is left of the machine: memory, and nothing else.

`apart` runs each record in a child. Memory is apart by construction; the rest of the machine is shared, and is taken
away before the record runs:

    open files    inherited ones are closed, for children share their offsets, and pipes and sockets lead to others
    shared pages  can be read and not written
    the kernel    allows what computing needs (memory, threads, waiting) and nothing else: no file is opened or looked
                  at, no connection made, no process started or told anything, and the number of a process, which
                  counts those before it, is 0 (seccomp, where the kernel has it)
    clocks        stand still at zero: how late it is tells how long others took
    traces        no image of the memory is written when the process fails, and nobody may look into it

All of it is of Linux. Python tells of changes to the machine besides (`watched`), whatever the kernel has.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import signal
import struct
from dataclasses import dataclass

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
# Options of prctl in <linux/prctl.h>, and of seccomp.
_END_WITH_PARENT, _DUMPABLE, _SECCOMP, _NO_NEW_PRIVILEGES = 1, 4, 22, 38
_FILTER = 2  # the mode of seccomp that asks a program
_READ, _WRITE, _EXECUTE = 1, 2, 4  # what pages are for, to mprotect
_SHARED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .w.s ", re.MULTILINE)
_CLOCKS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*\[vdso\]$", re.MULTILINE)
# What stands in the place of the functions that read clocks without asking the kernel: the time is zero.
_AT_ZERO = {
    "__vdso_clock_gettime": bytes.fromhex("31c0 488906 48894608 c3"),
    "__vdso_gettimeofday": bytes.fromhex("31c0 4885ff 7407 488907 48894708 c3"),
    "__vdso_time": bytes.fromhex("31c0 4885ff 7403 488907 c3"),
}
_SYMBOLS = 11  # the kind of section that has the names of functions, in <elf.h>

# System calls of x86-64 that computing needs: memory, threads, own signals, waiting, chance, the end; and reading and
# writing what is open, which is nothing.
_ALLOWED_WORDS = """
    0 read 1 write 3 close 5 fstat 7 poll 8 lseek 9 mmap 10 mprotect 11 munmap 12 brk 13 rt_sigaction 14 rt_sigprocmask
    15 rt_sigreturn 20 writev 24 sched_yield 25 mremap 28 madvise 35 nanosleep 60 exit 63 uname 102 getuid 104 getgid
    107 geteuid 108 getegid 131 sigaltstack 202 futex 204 sched_getaffinity 218 set_tid_address 230 clock_nanosleep
    231 exit_group 239 get_mempolicy 270 pselect6 271 ppoll 273 set_robust_list 318 getrandom 324 membarrier 334 rseq
"""
_ALLOWED = tuple(int(word) for word in _ALLOWED_WORDS.split() if word.isdigit())
_NOBODY = (39, 110, 186)  # getpid, getppid, gettid: the answer is 0, for numbers of processes count them
_CLONE, _CLONE3, _PRLIMIT = 56, 435, 302  # allowed for some arguments, or said not to be there
_THREAD = 0x10000  # CLONE_THREAD
_ALLOW, _REFUSE, _NOT_THERE, _ZERO = 0x7FFF0000, 0x00050001, 0x00050026, 0x00050000  # last ones: an error number
_ARCHITECTURE, _OTHER_NUMBERS = 0xC000003E, 0x40000000  # x86-64, and where numbers of its 32-bit pointers begin
_LOAD, _IF, _IF_ANY, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # of a filter of packets, which this is


@dataclass(frozen=True)
class Confinement:
    """What is taken away, found out before the fork: shared pages, where to write what nobody hears, the program."""

    shared: tuple[tuple[int, int], ...]
    nowhere: int
    program: bytes
    clocks: tuple[tuple[int, int], ...]
    patches: tuple[tuple[int, bytes], ...]

    @classmethod
    def of_this_process(cls, nowhere: int, room: int) -> Confinement:
        """`room`: the address of shared pages that stay as they are."""
        with open("/proc/self/maps") as maps:
            text = maps.read()
        shared, clocks = ([(int(a, 16), int(b, 16)) for a, b in kind.findall(text)] for kind in (_SHARED, _CLOCKS))
        known = platform.machine() == "x86_64" and struct.calcsize("P") == 8
        patches = [patch for start, end in clocks for patch in _patches(start, end - start)] if known else []
        return cls(
            tuple((start, end) for start, end in shared if not start <= room < end),
            nowhere,
            _program() if known else b"",
            tuple(clocks) if known else (),
            tuple(patches),
        )

    def begin(self) -> None:
        """In the child, before anybody else's code runs there; there is no way back."""
        system = _system()
        system.prctl(_END_WITH_PARENT, signal.SIGKILL)
        system.prctl(_DUMPABLE, 0)
        for stream in range(3):
            os.dup2(self.nowhere, stream)
        os.closerange(3, 1 << 30)
        for start, end in self.shared:
            if _allow(system, start, end, _READ):
                os._exit(1)
        for start, end in self.clocks:
            if not _allow(system, start, end, _READ | _WRITE | _EXECUTE):
                for place, code in self.patches:
                    ctypes.memmove(place, code, len(code))
                _allow(system, start, end, _READ | _EXECUTE)
        system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        if self.program:
            steps = ctypes.create_string_buffer(self.program)
            whole = struct.pack("HxxxxxxP", len(self.program) // 8, ctypes.addressof(steps))
            system.prctl(_SECCOMP, _FILTER, ctypes.create_string_buffer(whole))


def _system() -> ctypes.CDLL:
    """The C library, holding on to the interpreter: no other thread runs in between."""
    return ctypes.PyDLL(None, use_errno=True)


def _allow(system: ctypes.CDLL, start: int, end: int, what: int) -> int:
    refused: int = system.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), what)
    return refused


@functools.cache
def _patches(start: int, size: int) -> list[tuple[int, bytes]]:
    """Where the functions lie that read clocks, by the table of names in these pages, and what stands there instead."""
    image = ctypes.string_at(start, size)
    table, each, count = struct.unpack_from("Q", image, 40)[0], *struct.unpack_from("HH", image, 58)
    if image[:5] != b"\x7fELF\x02" or not table or table + each * count > size:
        return []
    sections = [struct.unpack_from("IIQQQQIIQQ", image, table + each * place) for place in range(count)]
    found: list[tuple[int, bytes]] = []
    for _, kind, _, _, begin, length, names, *_ in sections:
        if kind != _SYMBOLS:
            continue
        for place in range(begin, begin + length, 24):
            name, _, _, _, value, _ = struct.unpack_from("IBBHQQ", image, place)
            text = image[sections[names][4] + name :].split(b"\0", 1)[0].decode("ascii", "replace")
            if text in _AT_ZERO:
                found.append((start + value, _AT_ZERO[text]))
    return found


@functools.cache
def _program() -> bytes:
    """What the kernel does with each system call, as a program of its own small machine."""
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),
        (_IF, 1, 0, _ARCHITECTURE),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, 0),
        (_IF_AT_LEAST, 0, 1, _OTHER_NUMBERS),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for number in _ALLOWED:
        steps += [(_IF, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number in _NOBODY:
        steps += [(_IF, 0, 1, number), (_RETURN, 0, 0, _ZERO)]
    steps += [(_IF, 0, 1, _CLONE3), (_RETURN, 0, 0, _NOT_THERE)]  # its flags cannot be looked at; callers go on to:
    steps += _if_argument(_CLONE, 0, [(_IF_ANY, 0, 1, _THREAD), (_RETURN, 0, 0, _ALLOW)])
    steps += _if_argument(_PRLIMIT, 2, [(_IF, 0, 1, 0), (_RETURN, 0, 0, _ALLOW)])  # asks for a limit, sets none
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, (_RETURN, 0, 0, _REFUSE)])


def _if_argument(number: int, argument: int, then: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """For this system call look at an argument (its lower half), and refuse what is not allowed there."""
    looked = [(_LOAD, 0, 0, 16 + 8 * argument), *then, (_RETURN, 0, 0, _REFUSE)]
    return [(_IF, 0, len(looked), number), *looked]
