"""Ranks for tests, forked from one process that has imported torch: they meet over gloo."""

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "tunix_rt.engines.torch.loop", "torch.distributed.fsdp", "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2",
])  # fmt: skip
TIMEOUT_SECONDS = 120


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
