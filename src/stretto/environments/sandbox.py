"""A sandbox for processes that run code written by a model. Linux, no privileges needed; see `docs/security.md`.

`enter` is called by a process at its start, while it has one thread. It returns in a process that has

- namespaces of its own: another user without capabilities, no network, a read-only file system with one small writable
  folder and without the home folder of the user, and no other process in sight. They need a kernel that lets a user
  make namespaces;
- a filter of system calls: no sockets, no tracing of other processes, no mounts. It needs x86-64 or arm64;
- resource limits on memory, the size of files, and processes.

What the kernel refuses is left out, and `enter` returns the parts that hold. With namespaces there are three processes:

    the process that was started     waits, and ends as the third does. Killing it kills all
      process 1 of the namespace     collects what ends. If it ends, the kernel kills every process of the namespace
        the process that returns     runs the code
        the forwarder, if asked for  carries connections to one address of the namespace to a Unix socket outside

With a forwarder, code may open sockets of the internet family. Its network has no interface but its own loopback, where
only the forwarder listens.

Imports only the standard library: reward workers load this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pwd
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn


class Limits(NamedTuple):
    """The limits of a sandbox. `memory` and `disk` are in bytes."""

    memory: int  # address space of each process
    disk: int  # of each file, and with namespaces of all files together
    processes: int  # processes and threads at once


class Forward(NamedTuple):
    """An address on the loopback of the sandbox whose connections go to a Unix socket outside of it."""

    port: int
    path: str


# Each part, with what code in the sandbox can do if the part does not hold.
PARTS = {
    "network": "it can use the network",
    "files": "it can write files wherever your user can",
    "home": "it can read the files of your home folder",
    "processes": "it can see and signal other processes of your user, and read their environment variables; a process "
    "that it starts may outlive it",
    "process count": "it can start any number of processes",
    "system calls": "it can use sockets of local services, and trace other processes of your user",
    "memory": "it can take all memory",
    "file size": "it can fill the disk",
}

_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000  # user, mount, pid, network, ipc
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 1  # of a network interface
_INTERNET = 2  # family of sockets
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LAST_CAPABILITY = 63
ACCEPT_AGAIN_S = 0.05
RESERVED_NUMBERS = 300  # of processes: the kernel gives each of them once, and never again

# Numbers of the refused system calls on x86-64 and on arm64. A process of the sandbox gets `PermissionError`.
_REFUSED = {
    "socket": (41, 198),  # a pair of connected sockets is another call, and allowed
    "io_uring_setup": (425, 425),  # would open sockets past this filter
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, and the kernel's number


def enter(
    folder: str,
    limits: Limits,
    *,
    kept: Iterable[str] = (),
    forward: Forward | None = None,
    working_folder: str | None = None,
) -> frozenset[str]:
    """Turns this process into a sandbox with `folder` as its working directory. Returns the `PARTS` that hold.

    With namespaces, returns in a grandchild; this process then only waits for it. `folder` must exist and be empty.
    `kept` are paths that stay readable if they lie in the home folder; Python, its modules and the working directory do
    in any case. Raises `OSError` if there is a `forward` and no namespace. `working_folder`: instead of `folder`.
    """
    held: set[str] = set()
    paths = [folder, os.getcwd(), sys.prefix, sys.base_prefix, *filter(None, sys.path), *kept]
    if sys.platform == "linux" and _succeeds_in_a_copy(lambda: _isolate(folder, limits, paths, None)):
        isolated = _isolate(folder, limits, paths, forward)
        held |= {"network", "files", "processes"}
        held |= {part for part, holds in (("process count", isolated.counted), ("home", isolated.hidden)) if holds}
    elif forward is not None:
        raise OSError("a forwarded address needs namespaces, which this kernel does not let your user make")
    os.chdir(folder if working_folder is None else working_folder)
    os.umask(0o077)
    if _filter_calls(internet=forward is not None):
        held |= {"system calls", "network"}
    for part, kind, amount in (
        ("memory", resource.RLIMIT_AS, limits.memory),
        ("file size", resource.RLIMIT_FSIZE, limits.disk),
    ):
        if _limit(kind, amount):
            held.add(part)
    _limit(resource.RLIMIT_CORE, 0)
    return frozenset(held)


def missing(held: frozenset[str]) -> list[str]:
    """Returns what code in a sandbox can do because parts of it do not hold, one phrase each."""
    return [open_ for part, open_ in PARTS.items() if part not in held]


def _limit(kind: int, amount: int) -> bool:
    hard = resource.getrlimit(kind)[1]
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    try:
        resource.setrlimit(kind, (amount, amount))
    except (OSError, ValueError):
        return False
    return True


# -- namespaces --------------------------------------------------------------------------------------------------------


class _Isolated(NamedTuple):
    counted: bool  # its processes are bounded
    hidden: bool  # the home folder is out of sight


def _isolate(folder: str, limits: Limits, kept: Iterable[str], forward: Forward | None) -> _Isolated:
    """Moves into new namespaces, and returns in their second process.

    Raises `OSError` if the kernel refuses a step; the process is of no use then.
    """
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_NAMESPACES)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    hidden = _hide_home(kept)
    _make_read_only("/")
    _own_dev(folder)
    options = f"size={limits.disk},mode=700".encode()
    _call("mount", b"tmpfs", folder.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)
    _continue_in_child(ends_with_parent=True)  # as process 1 of the new namespace of processes
    counted = _own_proc(limits.processes)
    if forward is not None:
        _start_forwarder(forward)
    _continue_in_child()
    if user != 0:  # the kernel does not count the processes of root
        counted = _limit(resource.RLIMIT_NPROC, limits.processes)
    _drop_capabilities()
    return _Isolated(counted, hidden)


def _hide_home(kept: Iterable[str]) -> bool:
    """Mounts an empty folder over the home folder, with what is `kept` of it. False if all of it has to be kept."""
    home = os.path.realpath(pwd.getpwuid(os.getuid()).pw_dir)
    if home == "/" or not os.path.isdir(home):
        return home != "/"
    inside: list[str] = []
    for path in sorted({os.path.realpath(path) for path in kept if os.path.exists(path)}):
        if path == home or home.startswith(f"{path}/"):
            return False
        if path.startswith(f"{home}/") and not any(path.startswith(f"{outer}/") for outer in inside):
            inside.append(path)
    places = {path: os.open(path, os.O_PATH) for path in inside}
    _call("mount", b"tmpfs", home.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=1048576,mode=755")
    for path, place in places.items():
        if os.path.isdir(f"/proc/self/fd/{place}"):
            os.makedirs(path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _write(path, "")
        _call("mount", f"/proc/self/fd/{place}".encode(), path.encode(), None, _MS_BIND | _MS_REC, None)
        os.close(place)
    return True


def _start_forwarder(forward: Forward) -> None:
    """Starts a process that accepts connections on the loopback and carries them to a Unix socket."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", request)[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _IS_UP))
    server = socket.create_server(("127.0.0.1", forward.port), backlog=128)
    if os.fork():
        server.close()
        return
    try:
        _drop_capabilities()
        while True:
            try:
                inside, _ = server.accept()
            except OSError:  # too many connections at once
                time.sleep(ACCEPT_AGAIN_S)
                continue
            _forward(inside, forward.path)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _forward(inside: socket.socket, path: str) -> None:
    """Carries one connection in both directions. If that cannot be done, it ends, and others are not disturbed."""
    outside = None
    try:
        outside = socket.socket(socket.AF_UNIX)
        outside.connect(path)
        for source, target in ((inside, outside), (outside, inside)):
            threading.Thread(target=_carry, args=(source, target), daemon=True).start()
    except (OSError, RuntimeError):  # nobody listens, or there are too many files or threads
        for each in filter(None, (inside, outside)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _carry(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes until one side ends."""
    try:
        while piece := source.recv(1 << 16):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # the other side is gone
        for each in (source, target):
            each.close()


def _own_dev(folder: str) -> None:
    """Mounts a `/dev` with harmless devices alone: a read-only mount does not keep root from writing to a disk."""
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES if os.path.exists(f"/dev/{name}")}
    _call("mount", b"tmpfs", b"/dev", b"tmpfs", _MS_NOSUID | _MS_NOEXEC, b"size=65536,mode=755")
    for name, device in devices.items():
        _write(f"/dev/{name}", "")
        _call("mount", f"/proc/self/fd/{device}".encode(), f"/dev/{name}".encode(), None, _MS_BIND, None)
        os.close(device)
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": folder}
    for name, target in links.items():
        os.symlink(target, f"/dev/{name}")
    _make_read_only("/dev")


def _own_proc(processes: int) -> bool:
    """Mounts a `/proc` of this namespace alone, or an empty folder. True if the kernel bounds its process numbers."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    try:
        _call("mount", b"proc", b"/proc", b"proc", flags, None)
    except OSError:  # parts of this machine's `/proc` are hidden, as in many containers
        _call("mount", b"tmpfs", b"/proc", b"tmpfs", flags, b"size=0,mode=555")
        return False
    try:
        _write("/proc/sys/kernel/pid_max", str(RESERVED_NUMBERS + processes))
        return True
    except OSError:  # before Linux 6.14 the number is one for the whole machine
        return False
    finally:
        _make_read_only("/proc")


def _make_read_only(path: str) -> None:
    """Makes a mount and those below it read-only."""
    attributes = struct.pack("<QQQQ", _ATTR_RDONLY, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, len(attributes))


def _drop_capabilities() -> None:
    """Gives up every capability for good. Without this, code could undo the mounts."""
    for capability in range(_LAST_CAPABILITY + 1):
        _libc().prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the kernel's last
    header = struct.pack("<Ii", 0x20080522, 0)
    _call("capset", header, struct.pack("<6I", *[0] * 6))


def _continue_in_child(*, ends_with_parent: bool = False) -> None:
    """Forks and returns in the child. The parent waits until the child ends, and ends the same way.

    `ends_with_parent`: the child is killed if the parent is, even if that happens before it can ask the kernel for it.
    """
    lives, held = os.pipe()  # the parent alone holds the second end: the first is at its end when the parent is gone
    child = os.fork()
    if child == 0:
        os.close(held)
        if ends_with_parent:
            _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if select.select([lives], [], [], 0)[0]:
                os._exit(1)
        os.close(lives)
        return
    os.close(lives)
    while True:
        ended, status = os.wait()
        if ended == child:
            _end_like(status)


def _end_like(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    number = -code if code < 0 else code - 128
    if 0 < number < signal.NSIG and os.getpid() != 1:  # process 1 cannot be killed by itself
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(128 + number if code < 0 else code)


def _succeeds_in_a_copy(work: Callable[[], object]) -> bool:
    """Tries something in a child process, because a process that fails halfway is of no use."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except OSError:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- system calls ------------------------------------------------------------------------------------------------------


def _filter_calls(*, internet: bool) -> bool:
    """Refuses the system calls of `_REFUSED` from now on, also in children. False if there is no such filter here.

    With `internet`, sockets of that family are allowed.
    """
    machine = _MACHINES.get(os.uname().machine)
    if sys.platform != "linux" or machine is None or sys.byteorder != "little":
        return False
    column, architecture = machine
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # of the kernel's filter language
    refuse = (give, 0, 0, 0x00050000 | 1)  # EPERM
    numbers = [entry[column] for name, entry in _REFUSED.items() if name != "socket"]
    steps = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, architecture),
        refuse,  # 32-bit programs have other numbers
        (load, 0, 0, 0),  # the number of the call
        (at_least, 0, 1, 0x40000000),
        refuse,  # the x32 numbers of x86-64
    ]
    family = [(load, 0, 0, 16), (equal, 1, 0, _INTERNET)] if internet else []  # the call's first argument
    steps += [(equal, 0, len(family) + 1, _REFUSED["socket"][column]), *family, refuse, (load, 0, 0, 0)]
    for number in numbers:
        steps += [(equal, 0, 1, number), refuse]
    steps.append((give, 0, 0, 0x7FFF0000))  # allow
    program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    header = struct.pack("<H6xQ", len(steps), ctypes.addressof(program))
    try:
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("prctl", _PR_SET_SECCOMP, 2, header, 0, 0)
    except OSError:
        return False
    return True


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int | bytes | None) -> None:
    """Calls a function of the C library. Raises `OSError` if it fails."""
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    if getattr(_libc(), name)(*words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def arguments(folder: str, limits: Limits, **options: Any) -> list[str]:
    """The arguments with which this file, run as a program, enters a sandbox; a command to run in it may follow.

    It does not outlive the process that calls this, which has to be the one that starts it.
    """
    return [json.dumps({"folder": folder, "limits": limits, "parent": os.getpid(), **options})]


def _main(options: str, *command: str) -> NoReturn:
    """Runs a command in a sandbox, or prints the parts that hold."""
    with contextlib.suppress(OSError, AttributeError):  # on Linux alone
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # not longer than the process that started it
    given = json.loads(options)
    if given.pop("parent") != os.getppid():  # which ended before it could be asked for
        os._exit(1)
    forward = given.pop("forward", None)
    limits = Limits(*given.pop("limits"))
    held = enter(given.pop("folder"), limits, forward=None if forward is None else Forward(*forward), **given)
    if not command:
        print("\n".join(sorted(held)), flush=True)
        os._exit(0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    _main(*sys.argv[1:])
