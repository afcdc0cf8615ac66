"""A limited process stops at its limits and never outlives us. Every process here is a real one."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tunix_rt.errors import HardwareError
from tunix_rt.evidence import sandbox
from tunix_rt.evidence.sandbox import Exit, Limits, run_limited

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs the Linux kernel")


def run(command: Sequence[str], **options) -> tuple[Exit, str, str]:
    """The end of a command, its output and its errors."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given = {"limits": Limits(wall_seconds=30.0), "environment": {}, "folder": Path("/"), "stdin": b"", **options}
        ended = run_limited(command, stdout=out, stderr=err, **given)
        texts = [os.pread(file.fileno(), 4 * MIB, 0).decode() for file in (out, err)]
    return ended, *texts


def python(code: str, **options) -> tuple[Exit, str, str]:
    return run([sys.executable, "-I", "-S", "-c", textwrap.dedent(code)], **options)


def sleeper(file: Path) -> str:
    """A program that writes its process id to `file` and sleeps."""
    return f"import os, time; open({str(file)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(60)"


def wait_for_pid(file: Path) -> int:
    until = time.monotonic() + 20.0
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < until, f"{file} was not written"
        time.sleep(0.02)
    return int(file.read_text())


def is_gone(pid: int) -> bool:
    """Within two seconds."""
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_a_process_has_the_given_input_folder_and_environment_and_ends_with_its_own_code():
    code = "import os, sys; print(sys.stdin.read(), os.getcwd()); print('problem', file=sys.stderr); sys.exit(3)"
    ended, out, err = python(code, stdin=b"x" * 300_000, folder=Path("/usr"))
    assert (ended.code, ended.breach, err) == (3, "", "problem\n")
    assert out == "x" * 300_000 + " /usr\n"
    assert 0.0 < ended.seconds < 30.0
    ended, out, _ = run(["/usr/bin/env"], environment={"ONE": "1"}, stdin=b"x" * MIB)  # input that nobody reads
    assert (ended.code, out) == (0, "ONE=1\n")


def test_wall_clock_time_ends_a_process_and_what_left_its_group(tmp_path: Path):
    file = tmp_path / "pid"
    code = f"""
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-S", "-c", {sleeper(file)!r}], start_new_session=True)
        time.sleep(60)
        """

    def pulse(_seconds: float) -> Limits | None:
        return Limits(wall_seconds=0.5) if file.exists() and file.read_text().endswith("\n") else None

    ended, _, _ = python(code, pulse=pulse)
    assert (ended.code, ended.breach) == (None, "0.5 s of wall-clock time")
    assert 0.5 <= ended.seconds < 20.0
    assert is_gone(wait_for_pid(file))


def test_no_process_of_the_group_outlives_the_call_however_it_ends(tmp_path: Path):
    inner = sleeper(tmp_path / "left")
    code = f"""
        import os, subprocess, sys, time
        subprocess.Popen([sys.executable, "-S", "-c", {inner!r}])
        while not os.path.exists({str(tmp_path / "left")!r}): time.sleep(0.01)
        time.sleep(0.1)
        """
    assert python(code)[0].code == 0
    assert is_gone(wait_for_pid(tmp_path / "left"))

    def interrupt(_seconds: float) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        python(sleeper(tmp_path / "pid"), pulse=interrupt)
    assert is_gone(wait_for_pid(tmp_path / "pid"))


def test_resident_memory_of_the_process_and_its_children_is_limited():
    grow = "import time; kept = []; [(kept.append(b'x' * (8 << 20)), time.sleep(0.01)) for _ in range(200)]; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {grow!r}])"
    ended, _, _ = python(code, limits=Limits(wall_seconds=30.0, resident_bytes=256 * MIB))
    assert (ended.code, ended.breach) == (None, "256.0 MiB of memory")
    assert ended.peak_bytes > 256 * MIB


@pytest.mark.slow
def test_cpu_time_ends_a_process_that_ignores_the_signal_too_and_another_sigkill_is_no_breach():
    limits = Limits(wall_seconds=60.0, cpu_seconds=1)
    ignore = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda start: python(f"{start}while True: pass", limits=limits)[0], ["", ignore]))
    assert [(ended.code, ended.breach) for ended in both] == [(None, "1 s of CPU time")] * 2
    ended, _, _ = python("import os; os.kill(os.getpid(), 9)", limits=limits)
    assert (ended.code, ended.breach) == (-signal.SIGKILL, "")


@linux
def test_the_kernel_limits_address_space_open_files_and_core_dumps():
    code = """
        import resource
        print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE), flush=True)
        b'x' * (1 << 30)
        """
    ended, out, err = python(code, limits=Limits(wall_seconds=30.0, address_bytes=512 * MIB, open_files=64))
    assert (ended.code, out) == (1, "(64, 64) (0, 0)\n")
    assert "MemoryError" in err


def test_files_above_the_limit_are_refused_by_the_kernel(tmp_path: Path):
    limits = Limits(wall_seconds=30.0, file_bytes=MIB)
    ended, _, err = python(f"open({str(tmp_path / 'file')!r}, 'wb').write(b'x' * (2 << 20))", limits=limits)
    assert ended.code == 1
    assert "File too large" in err
    assert (tmp_path / "file").stat().st_size <= MIB
    # A program that does not ignore the signal, as Python does.
    ended, _, _ = run(["head", "-c", str(2 * MIB), "/dev/zero"], limits=limits, environment={"PATH": "/usr/bin:/bin"})
    assert (ended.code, ended.breach) == (None, "1.0 MiB in one file")


@pytest.mark.slow
def test_the_pulse_replaces_time_and_memory_limits():
    beats: list[float] = []

    def pulse(seconds: float) -> Limits | None:
        beats.append(seconds)
        if seconds < 0.2:
            return None
        return Limits(wall_seconds=30.0, resident_bytes=MIB if seconds > 1.0 else None)

    ended, _, _ = python("import time; time.sleep(60)", limits=Limits(wall_seconds=0.7), pulse=pulse)
    assert (ended.code, ended.breach) == (None, "1.0 MiB of memory")
    assert beats == sorted(beats)
    assert 3 <= len(beats) <= 15


@linux
@pytest.mark.parametrize("network", [True, False])
def test_sigkill_of_the_parent_ends_the_process(tmp_path: Path, network: bool):
    if not network:
        need_namespaces()
    own = f"""
        import sys
        from pathlib import Path
        from tunix_rt.evidence.sandbox import Limits, run_limited
        run_limited([sys.executable, "-S", "-c", {sleeper(tmp_path / "pid")!r}], limits=Limits(wall_seconds=60),
                    environment={{}}, folder=Path("/"), stdin=b"", stdout=sys.stdout.buffer, stderr=sys.stderr.buffer,
                    network={network})
        """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(own)])
    try:
        pid = wait_for_pid(tmp_path / "pid")
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        parent.wait()
    assert is_gone(pid)


@linux
def test_a_process_whose_parent_died_before_it_started_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command = ["/usr/bin/touch", str(tmp_path / "ran")]
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)  # the launcher finds another parent than the one it was given
        assert run(command)[0].code == 127
    assert not (tmp_path / "ran").exists()
    assert run(command)[0].code == 0
    assert (tmp_path / "ran").exists()


def need_namespaces() -> None:
    try:
        python("pass", network=False)
    except HardwareError as error:
        pytest.skip(error.problem)


@linux
def test_without_network_no_address_can_be_reached_and_the_user_stays(tmp_path: Path):
    need_namespaces()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
            import os, socket
            open("file", "w").write("x")
            print(os.getuid(), os.stat("file").st_uid, flush=True)
            socket.create_connection(("127.0.0.1", {port}), timeout=5)
            """
        assert python(code, folder=tmp_path)[0].code == 0
        ended, out, err = python(code, folder=tmp_path, network=False)
    assert (ended.code, out) == (1, f"{os.getuid()} {os.getuid()}\n")
    assert "unreachable" in err


def test_a_kernel_that_refuses_the_namespace_is_a_hardware_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    text = sandbox.LAUNCHER.read_text()
    # Not a namespace of any kernel: it answers EINVAL, as one without network namespaces does.
    changed = text.replace("0x40000000", "0x00000001").replace("0x10000000", "0x00000002")
    assert changed != text
    (tmp_path / "launcher.py").write_text(changed)
    monkeypatch.setattr(sandbox, "LAUNCHER", tmp_path / "launcher.py")
    with pytest.raises(HardwareError, match="namespace") as refused:
        python("pass", network=False)
    assert "user namespaces" in refused.value.fix
    assert refused.value.exit_code == 4


def test_a_command_that_cannot_start_raises_as_from_subprocess_and_leaks_no_descriptor(tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("no program")
    before = psutil.Process().num_fds()
    for name, kind in (("no-such-command-here", FileNotFoundError), (str(text), PermissionError)):
        with pytest.raises(kind) as refused:
            run([name], environment={"PATH": "/usr/bin"})
        assert refused.value.filename == name
    assert psutil.Process().num_fds() == before


def test_a_caller_needs_neither_home_nor_a_folder_nor_limits_as_high_as_the_given_ones(tmp_path: Path):
    """Its output here is a pipe."""
    inner = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    own = f"""
        import os, resource, sys
        from pathlib import Path
        from tunix_rt.evidence.sandbox import Limits, run_limited
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        os.environ.pop("HOME", None)
        os.mkdir({str(tmp_path / "gone")!r})
        os.chdir({str(tmp_path / "gone")!r})
        os.rmdir({str(tmp_path / "gone")!r})
        run_limited([sys.executable, "-I", "-S", "-c", {inner!r}], limits=Limits(wall_seconds=30), environment={{}},
                    folder=Path("/"), stdin=b"", stdout=sys.stdout.buffer, stderr=sys.stderr.buffer)
        """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(own)], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "(100, 100)\n", ended.stderr
