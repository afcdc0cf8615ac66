"""The first instructions of a limited process: it sets its own limits, then becomes the command.

`sandbox.py` runs this file as a script (`python -I -S launcher.py OPTIONS COMMAND...`), so it imports the standard library
alone. A `preexec_fn` would run Python between fork and exec of a process that has torch's and JAX's threads, where a lock
that another thread holds is never released.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, CLONE_NEWUSER, CLONE_NEWNET = 1, 38, 0x10000000, 0x40000000


def main(command: list[str], parent: int, status: int, network: bool, lc_ctype: bool, limits: dict[str, int]) -> None:
    """A failure goes to the pipe `status`, which a successful exec closes."""
    os.set_inheritable(status, False)
    stage = "network"
    try:
        if not network:
            leave_network()
        stage = "start"
        die_with(parent)
        # What Python ignores or our caller blocks would stay so in the command.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGXCPU, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if not lc_ctype:  # Python sets it where the locale is C
            os.environ.pop("LC_CTYPE", None)
        for name, value in limits.items():
            kind = getattr(resource, name)
            present = resource.getrlimit(kind)[1]  # never above it
            most = sys.maxsize if present == resource.RLIM_INFINITY else present
            # SIGXCPU comes at the soft limit, and SIGKILL a second later.
            resource.setrlimit(kind, (min(value, most), min(value + (name == "RLIMIT_CPU"), most)))
        os.execvp(command[0], command)
    except (AttributeError, OSError) as error:  # AttributeError: the system has no such call
        os.write(status, f"{stage} {getattr(error, 'errno', errno.ENOSYS)}".encode())
        os._exit(127)


def leave_network() -> None:
    """A privileged process needs a network namespace alone; any other needs a user namespace too, with its own ids in it."""
    user, group = os.geteuid(), os.getegid()
    try:
        system_call("unshare", CLONE_NEWNET)
    except PermissionError:
        system_call("unshare", CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)


def die_with(parent: int) -> None:
    """After the namespaces, because new credentials clear the signal. A parent that died before the call sends none, and a
    set-user-id program would clear it, so none may be run."""
    if sys.platform == "linux":
        system_call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        system_call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)


def system_call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*map(ctypes.c_ulong, arguments)) != 0:
        raise OSError(ctypes.get_errno(), name)


if __name__ == "__main__":
    main(sys.argv[2:], **json.loads(sys.argv[1]))
