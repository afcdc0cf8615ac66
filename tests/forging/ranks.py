"""Ranks for tests, forked from one process that has imported torch: they meet over gloo."""

import datetime
import itertools
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "tunix_rt.cli.main", "tunix_rt.pipeline", "tunix_rt.engines.torch.follow", "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2",
])  # fmt: skip
TIMEOUT_SECONDS = 300


def on_ranks(world: int, act: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `act(*arguments)` returns in each of `world` ranks; an AssertionError with the traceback where it raises."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
        processes = [
            CONTEXT.Process(target=_rank, args=(rank, world, f"{folder}/store", sender, act, arguments), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            answers = [_answer(receiver, rank) for rank, (receiver, _) in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill() if any(one.exitcode for one in processes) else process.join(TIMEOUT_SECONDS)
    problems = [f"rank {rank}: {answer}" for rank, (good, answer) in enumerate(answers) if not good]
    assert not problems, "\n".join(problems)
    return [answer for _, answer in answers]


def _answer(receiver: Any, rank: int) -> tuple[bool, Any]:
    try:
        return receiver.recv() if receiver.poll(TIMEOUT_SECONDS) else (False, f"no answer in {TIMEOUT_SECONDS} s")
    except EOFError:
        return False, "ended without an answer"


def _rank(rank: int, world: int, path: str, sender: Any, act: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"} | {name: str(value) for name, value in numbers.items()}
    try:
        if world > 1:
            limit = datetime.timedelta(seconds=TIMEOUT_SECONDS / 2)
            store = dist.FileStore(path, world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        sender.send((True, act(*arguments)))
    except BaseException:  # noqa: BLE001  whatever it is, the test shows it
        sender.send((False, traceback.format_exc()))
        return
    if world > 1:
        dist.destroy_process_group()


def start_ranks(folder: Path, *commands: list[str], **environment: str) -> list[Any]:
    """A process for each of these command lines, as a launcher starts the ranks of a run. Their stderr is `folder`/rank-N. In the
    environment, HANGS_AT is a step before which a rank hangs that is not rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    numbers = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        CONTEXT.Process(
            target=_program,
            args=(folder / f"rank-{rank}", words, environment | numbers | {"RANK": str(rank)}),
            daemon=True,
        )
        for rank, words in enumerate(commands)
    ]
    for process in processes:
        process.start()
    return processes


def ended_ranks(processes: list[Any], folder: Path) -> list[tuple[int, str]]:
    """Exit code and stderr of each, once all have ended."""
    for process in processes:
        process.join(TIMEOUT_SECONDS)
    try:
        return [(one.exitcode, (folder / f"rank-{rank}").read_text()) for rank, one in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()


def _program(said: Path, words: list[str], environment: dict[str, str]) -> None:
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= environment | {"LOCAL_RANK": environment["RANK"], "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    import torch

    from tunix_rt.cli.main import cli

    torch.set_num_threads(1)
    if "HANGS_AT" in environment:
        _hang_before_step(int(environment["HANGS_AT"]))
    cli.main(args=words, prog_name="tunix-rt")


def _hang_before_step(number: int) -> None:
    from tunix_rt.engines.torch.follow import Follower

    step, begun = Follower.step, itertools.count(1)

    def hangs(self: Follower) -> None:
        if next(begun) == number:
            time.sleep(600)
        step(self)

    Follower.step = hangs  # type: ignore[method-assign]
