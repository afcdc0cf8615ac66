"""`tunix-rt serve` as a process, called by the official client: streamed and whole, many at once, refused, gone, and ended."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from starlette.testclient import TestClient

from tests.chain_model import write_chain_model
from tests.e2e.test_chat import SAID, TEMPLATE
from tests.program import ROOT, command, environment, in_process, refused
from tests.tables import parametrize
from tunix_rt.inference import inference_device, load_resolved, model_spec, resolve_spec
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.index import is_training_in
from tunix_rt.serve.app import Served, make_app

POSITIONS = 1_200
LOOP = "xyz"


@contextlib.contextmanager
def served(model: object, *options: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address that `tunix-rt serve` prints, and its process."""
    words = command("serve", model, "--port", 0, "--device", "cpu", *options)
    with subprocess.Popen(
        words, env=environment(OMP_NUM_THREADS="1"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            line = server.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, line + server.stderr.read()
            yield found[0], server
        finally:
            server.kill()
            server.wait(timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model that answers what ends in `?`, never stops answering what ends in `!`, and answers nothing else."""
    folder = tmp_path_factory.mktemp("models") / "talker"
    return write_chain_model(folder, {"?": SAID, "!": f"{LOOP}..."}, template=TEMPLATE, positions=POSITIONS)


@pytest.fixture(scope="module")
def server(model) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with served(model) as found:
        yield found


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server[0], api_key="unused", max_retries=0, timeout=300) as made:
        yield made


def chat(client, question: str, **more):
    return client.chat.completions.create(
        model="talker", messages=[{"role": "user", "content": question}], **{"temperature": 0, **more}
    )


def generated(model: Path, question: str, *options: object) -> str:
    done = in_process("generate", model, question, "--device", "cpu", "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["text"]


def streamed(chunks) -> tuple[str, str, object]:
    """Text, finish_reason and usage of a stream."""
    chunks = list(chunks)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join((one.delta.content or "") if hasattr(one, "delta") else one.text for one in choices)
    [reason] = [one.finish_reason for one in choices if one.finish_reason]
    return text, reason, chunks[-1].usage


def test_whole_and_streamed_answers_are_those_of_generate(client, model):
    assert [one.id for one in client.models.list()] == ["talker"] and client.models.retrieve("talker").id == "talker"
    whole = chat(client, "How many?")
    assert whole.choices[0].message.content == generated(model, "How many?") == SAID
    assert (whole.choices[0].finish_reason, whole.choices[0].message.role) == ("stop", "assistant")
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and usage.prompt_tokens > 0
    pieces = list(chat(client, "How many?", stream=True, stream_options={"include_usage": True}))
    assert len(pieces) > 5 and pieces[0].choices[0].delta.role == "assistant"
    assert streamed(pieces) == (SAID, "stop", usage) and all(piece.usage is None for piece in pieces[:-1])

    sampled = {"temperature": 1.5, "top_p": 0.9, "max_tokens": 12}
    options = ("--temperature", 1.5, "--top-p", 0.9, "--max-new-tokens", 12, "--seed", 7)
    again = [chat(client, "Go on", seed=7, **sampled).choices[0].message.content for _ in range(2)]
    assert again == [generated(model, "Go on", *options)] * 2
    several = [chat(client, "Go on", n=8, **sampled, **seed).choices for seed in ({"seed": 7}, {}, {})]
    texts = [[one.message.content for one in choices] for choices in several]
    assert texts[0][0] == again[0] and [one.index for one in several[0]] == list(range(8))
    assert len(set(map(tuple, texts))) == 3 and len(set(texts[0])) > 1, "without a seed they differ"


def test_limits_and_stop_strings_end_a_text_where_they_should(client):
    cut = chat(client, "Go!", max_completion_tokens=5)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("xyzxy", "length")
    assert cut.usage.completion_tokens == 5
    for stop, text in (("zxy", "xy"), (["nothing", "yzx"], "x"), ("xyzxyz", "")):
        whole = chat(client, "Go!", stop=stop, max_tokens=50)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, "stop")
        assert streamed(chat(client, "Go!", stop=stop, max_tokens=50, stream=True))[:2] == (text, "stop")
    ended = chat(client, "Go!", stop="zq", max_tokens=8, stream=True)
    assert streamed(ended)[:2] == ("xyzxyzxy", "length"), "what may begin a stop string is not lost"
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, "so " * POSITIONS)
    assert (refusal.value.param, refusal.value.code) == ("messages", "context_length_exceeded")
    default = chat(client, "Go!")
    assert default.usage.completion_tokens == 256 and default.choices[0].finish_reason == "length"
    raw = client.completions.create(model="talker", prompt=["Go!", "How many?"], temperature=0, max_tokens=40)
    assert [(one.index, one.finish_reason) for one in raw.choices] == [(0, "length"), (1, "stop")]
    assert raw.choices[0].text == (LOOP * 14)[:40] and raw.choices[1].text == SAID
    off = {"logprobs": None, "frequency_penalty": 0.0, "presence_penalty": 0, "echo": False, "best_of": 1}
    parts = client.completions.create(model="talker", prompt="Go!", temperature=0, max_tokens=4, stream=True, **off)
    assert streamed(parts)[:2] == ("xyzx", "length")
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="talker", prompt="Go!", logprobs=0)  # asks for that of each chosen token
    assert (refusal.value.param, refusal.value.code) == ("logprobs", "unsupported_parameter")


def test_fifty_clients_at_once_each_get_their_own_answer(client):
    def ask(number: int) -> bool:
        if number % 3 == 0:
            most = 1 + number
            text, reason, _ = streamed(chat(client, f"{number} Go!", max_tokens=most, stream=True))
            return (text, reason) == ((LOOP * most)[:most], "length")
        if number % 3 == 1:
            return chat(client, f"{number} How many?").choices[0].message.content == SAID
        sampled = [chat(client, f"{number}", temperature=1, seed=number, max_tokens=6) for _ in range(2)]
        return sampled[0].choices[0].message.content == sampled[1].choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        assert all(pool.map(ask, range(50)))


@parametrize("change", "status", "param", "code")
def test_what_is_not_supported_is_refused_as_the_api_does(client, change, status, param, code):
    body = {"model": "talker", "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 1} | change
    with pytest.raises(openai.APIStatusError) as refusal:
        client.post("/chat/completions", body=body, cast_to=object)
    error = refusal.value.body
    assert (refusal.value.status_code, error["param"], error["code"]) == (status, param, code), error
    assert error["type"] == "invalid_request_error" and error["message"]


def answered(server, head: str, body: bytes = b"") -> tuple[int, dict]:
    """Status and error object of a request that no client of the API makes."""
    port = urllib.parse.urlsplit(server[0]).port
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as one:
        one.sendall(f"{head}\r\n{length}Connection: close\r\n\r\n".encode() + body)
        came = b""
        while piece := one.recv(65536):
            came += piece
    lines, _, rest = came.partition(b"\r\n\r\n")
    return int(lines.split()[1]), json.loads(rest)["error"]


HERE, JSON = "Host: localhost", "Content-Type: application/json"
ASK = "POST /v1/chat/completions HTTP/1.1\r\n"


def test_only_programs_of_this_computer_are_answered_and_errors_are_objects(server):
    assert answered(server, "GET /v1/models HTTP/1.1\r\nHost: evil.example")[0] == 403
    assert answered(server, f"{ASK}{HERE}\r\n{JSON}\r\nSec-Fetch-Site: cross-site", b"{}")[0] == 403
    assert answered(server, f"{ASK}{HERE}\r\nContent-Type: text/plain", b"{}")[0] == 415
    assert answered(server, f"{ASK}{HERE}\r\n{JSON} ; charset=utf-8", b"{}")[0] == 400  # of the form that it names
    assert answered(server, f"{ASK}{HERE}\r\n{JSON}", b"{" + b" " * 2**20)[0] == 413
    for body in (b"", b"{", b"[]", b'{"model": NaN}', b'{"model": "\\ud800"}', b"\xff", b"[" * 9999):
        status, error = answered(server, f"{ASK}{HERE}\r\n{JSON}", body)
        assert (status, error["code"]) == (400, "invalid_json"), body
    assert answered(server, f"GET /v1/nothing HTTP/1.1\r\n{HERE}")[0] == 404
    assert answered(server, f"GET /v1/chat/completions HTTP/1.1\r\n{HERE}")[0] == 405
    assert answered(server, f"GET /v1/models/other HTTP/1.1\r\n{HERE}")[1]["code"] == "model_not_found"
    port, addresses = urllib.parse.urlsplit(server[0]).port, [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]  # fmt: skip
    assert [one.partition(":")[0] for one in addresses if one.endswith(f":{port:04X}")] == ["0100007F"]


def test_a_client_that_goes_away_frees_its_place(client):
    with chat(client, "Go!", max_tokens=POSITIONS - 100, stream=True) as stream:
        next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(
            model="talker", messages=[{"role": "user", "content": "Go!"}], temperature=0, max_tokens=POSITIONS - 100
        )
    began = time.monotonic()
    assert chat(client, "How many?").choices[0].message.content == SAID
    short = time.monotonic() - began
    began = time.monotonic()
    chat(client, "Go!", max_tokens=300)  # far fewer than the others had left
    assert short < time.monotonic() - began


def test_few_chunks_are_written_to_a_client_that_has_gone_however_many_are_ready(model):
    """Each of them would be a warning of asyncio: `socket.send() raised exception`."""
    loaded = load_resolved(resolve_spec(model_spec(str(model)), *inference_device("cpu", None)))
    app = make_app(Served(loaded, "talker", POSITIONS - 100, lambda: False))
    body = {"model": "talker", "prompt": "Go!", "temperature": 0, "stream": True}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    sent = []

    async def ask() -> None:
        gone, requests = asyncio.Event(), iter([{"type": "http.request", "body": json.dumps(body).encode()}])

        async def receive():
            if request := next(requests, None):
                return request
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) == 2:
                time.sleep(0.5)  # the generation goes on in its thread
                asyncio.get_running_loop().call_soon(gone.set)

        await app(scope, receive, send)

    with (
        concurrent.futures.ThreadPoolExecutor() as pool
    ):  # a thread without an event loop, which a browser's test leaves
        pool.submit(lambda: asyncio.run(ask())).result()
    assert 2 < len(sent) < 12, len(sent)


def runnable() -> float:
    """Runnable threads for each core: now, or in the minute before."""
    minute, *_, now = Path("/proc/loadavg").read_text().split()[:4]
    return max(float(minute), int(now.partition("/")[0])) / (os.cpu_count() or 1)


def test_ctrl_c_ends_it_within_two_seconds_while_it_streams(server, client):
    stream = chat(client, "Go!", max_tokens=POSITIONS - 100, stream=True)
    next(iter(stream))
    process = server[1]
    process.send_signal(signal.SIGINT)
    began, load = time.monotonic(), runnable()
    assert process.wait(timeout=60) == 0
    took, load = time.monotonic() - began, max(load, runnable())
    assert took < (2 if load <= 1 else 10), f"{took:.1f} s, {load:.1f} runnable threads for each core"
    errors = process.stderr.read()
    assert errors.endswith("Ctrl-C stops it.\n"), "nothing of clients that have gone, before or now: " + errors
    with pytest.raises((openai.APIError, openai.APIConnectionError)):
        list(stream)


def test_nothing_is_answered_while_a_run_trains_beside_it(tmp_path, model):
    run = RunDir(shutil.copytree(ROOT / "submission_runs" / "demo_v1", tmp_path / "one"))
    assert not is_training_in(tmp_path)
    with run.locked():
        assert is_training_in(tmp_path) and not is_training_in(tmp_path / "nowhere")
        words = refused(in_process("serve", run.root, "--port", 0), 3)
        assert "a run is training in" in words and "when it has ended" in words
    busy = True
    loaded = load_resolved(resolve_spec(model_spec(str(model)), *inference_device("cpu", None)))
    served = Served(loaded, "talker", 4, lambda: busy)
    body = {"model": "talker", "prompt": "Go!", "temperature": 0}
    with TestClient(make_app(served), base_url="http://localhost") as client:
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "device_busy")
        busy = False
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "xyzx"
        loaded.engine.model.lm_head.weight.data.fill_(float("nan"))  # such as a broken device gives
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")
        lines = client.post("/v1/completions", json=body | {"stream": True}).text.splitlines()
        assert "logits are NaN" in json.loads(lines[0].removeprefix("data: "))["error"]["message"] and not any(
            lines[1:]
        )
    served.batcher.close()
