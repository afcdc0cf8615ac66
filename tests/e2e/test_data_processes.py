"""Several processes prepare the data: the same bytes as one makes, nothing half there after a kill, nobody left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from tests.conftest import ROOT
from tests.program import command, environment
from tests.stores import files, quiet, recipe_for, write_sums
from tunix_rt.data import token_cache as store_module
from tunix_rt.data.token_cache import cache_folder, open_store
from tunix_rt.data.tokenize import in_order
from tunix_rt.errors import TunixError


def test_a_killed_build_leaves_nothing_that_is_read_and_no_process(tmp_path, monkeypatch):
    """kill -9 in the middle of a build by two processes: they end with it, and the next start makes it whole."""
    data = write_sums(tmp_path / "my.jsonl", 12_000)
    script = tmp_path / "build.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tests.stores import recipe_for\nfrom tunix_rt.data import token_cache\n"
        "if __name__ == '__main__':\n"
        "    token_cache.ONE_PROCESS_BYTES = 0\n"
        "    token_cache.open_store(recipe_for(Path(sys.argv[1])), lambda *fields: print(*fields, flush=True))\n"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python_path = os.pathsep.join([environment()["PYTHONPATH"], str(ROOT)])
    started = subprocess.Popen(
        [sys.executable, script, data], stdout=subprocess.PIPE, text=True, env=environment(PYTHONPATH=python_path)
    )
    assert started.stdout is not None
    assert "tokenize" in started.stdout.readline()
    children = psutil.Process(started.pid).children(recursive=True)
    assert len(children) >= 2
    started.send_signal(signal.SIGKILL)
    started.wait()
    started.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == [], "a worker outlived the program"
    place = cache_folder()
    assert [path.name[:8] for path in place.iterdir() if not path.name.endswith(".lock")] == [".staged-"]
    assert len(open_store(recipe_for(data), quiet).examples) == 12_000
    assert [path.name for path in place.iterdir() if path.name.startswith(".staged-")] == []


def test_several_processes_make_the_same_bytes_as_one(monkeypatch, tmp_path):
    data = write_sums(tmp_path / "my.jsonl")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    monkeypatch.setattr(store_module, "BATCH_RECORDS", 4)
    alone = open_store(recipe_for(data), quiet)
    monkeypatch.setattr(store_module, "ONE_PROCESS_BYTES", 0)
    monkeypatch.setattr(store_module, "cores", lambda: 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    together = open_store(recipe_for(data), quiet)
    assert together.folder != alone.folder
    assert files(together.folder) == files(alone.folder)
    assert together.merkle_root == alone.merkle_root
    assert json.loads((together.folder / "manifest.json").read_text())["processes"] == 2


@pytest.mark.slow  # needs a file so large that several processes are at work
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_ends_a_check_with_exit_7_and_nothing_half_made(tmp_path, number):
    """A terminal and many schedulers signal every process of a program at once."""
    data = write_sums(tmp_path / "my.jsonl", 300_000)
    assert data.stat().st_size > store_module.ONE_PROCESS_BYTES, "several processes must be at work"
    started = subprocess.Popen(
        command("data", "check", data), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env=environment(XDG_CACHE_HOME=str(tmp_path / "cache")), start_new_session=True,
    )  # fmt: skip
    place = tmp_path / "cache" / "tunix-rt" / "tokens"
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in place.glob(".staged-*/tokens.bin")):
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(started.pid).children(recursive=True)
    os.killpg(started.pid, number)
    _, output = started.communicate(timeout=60)
    assert started.returncode == 7, output
    assert f"stopped by {number.name}" in output and "Traceback" not in output and "resource_tracker" not in output
    assert len(children) >= 2 and psutil.wait_procs(children, timeout=60)[1] == []
    assert list(place.glob(".staged-*")) == []


def square(_, number):
    return number * number


def die(_, number):
    os._exit(3)


def test_results_come_in_order_and_only_a_few_batches_are_read_ahead():
    read = []

    def numbers():
        for number in range(40):
            read.append(number)
            yield number

    results = in_order(square, None, numbers(), processes=2)
    assert [next(results), next(results)] == [0, 1]
    assert len(read) <= 6, "all of it was read before the first result was taken"
    assert list(results) == [number * number for number in range(2, 40)]


def test_a_process_that_dies_is_an_error_with_a_way_out():
    with pytest.raises(TunixError, match="a worker process of the tokenization died"):
        list(in_order(die, None, range(3), processes=2))


CLOSED_BY_THE_POOL = """
    import time
    from tunix_rt.data.tokenize import in_order

    class Batch:
        def __reduce__(self):  # in the thread that sends batches to the workers, as garbage may be collected there
            results.close()
            return int, (1,)

    def work(state, batch):
        return batch

    if __name__ == "__main__":
        results = in_order(work, None, iter([1, 2, 3, 4, Batch()]), processes=2)
        assert [next(results), next(results)] == [1, 2]
        time.sleep(1)
        print("left")
    """


def test_a_tokenization_that_is_left_and_closed_in_a_thread_of_its_pool_does_not_wait_for_itself(tmp_path):
    script = tmp_path / "left.py"
    script.write_text(textwrap.dedent(CLOSED_BY_THE_POOL))
    done = subprocess.run([sys.executable, script], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "left" in done.stdout, done.stderr
