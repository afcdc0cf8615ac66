"""Twelve secrets where people leave them, through runs that fail and one that succeeds: none is in a file or on the screen."""

import http.server
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.planted import IN_THE_ENVIRONMENT, NETRC, planted_home
from tests.program import command, environment, tunix_rt
from tunix_rt.cli.main import cli
from tunix_rt.models.secrets import redacted

UNKNOWN_KEY = "plain-words-of-an-unknown-key-81"
WRONG_TYPE = "plain-words-of-a-known-key-4417"
LOOKS_LIKE_ONE = "hf_" + "ValueOfAKnownSettingAbCdEfGhIjKl"
IN_A_FILE = "plain-words-of-an-unknown-key-in-a-file-29"
USERINFO = "password-in-an-address-63"
QUERY = "query-of-an-address-9051"
SAID_BY_THE_HUB = "hf_" + "RepeatedByTheHubAbCdEfGhIjKlMnOp"
PLANTED = [
    *IN_THE_ENVIRONMENT.values(), UNKNOWN_KEY, WRONG_TYPE, LOOKS_LIKE_ONE, IN_A_FILE, USERINFO, QUERY, NETRC,
    SAID_BY_THE_HUB,
]  # fmt: skip
SMALL = ["--device", "cpu", "--max-steps", 2, "--set", "training.save_steps=2", "--set", "training.eval_steps=2"]
SMALL += ["--set", "evaluation.max_new_tokens=4"]


def leaks(said: str, *folders: Path) -> list[str]:
    """Which secrets are in what was said, or in a file or the name of one."""
    found = [secret for secret in PLANTED if secret in said]
    for path in (path for folder in folders for path in folder.rglob("*")):
        content = path.name.encode() + (path.read_bytes() if path.is_file() else b"")
        found += [f"{path.name}: {secret}" for secret in PLANTED if secret.encode() in content]
    return found


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cache = environment().get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # or everything is made again
    return {**planted_home(tmp_path_factory.mktemp("home")), "XDG_CACHE_HOME": cache}


def test_a_run_that_succeeds_and_its_bundles_contain_no_secret(
    tiny_run: Path, tiny_bundle: Path, tiny_replayable: Path, planted: dict[str, str]
) -> None:
    """The run that all tests share was made with the secrets in its environment."""
    assert (tiny_run / "rows.jsonl").is_file() and (tiny_bundle / "run_manifest.json").is_file()
    said = (tiny_bundle.parent / "said.txt").read_text(encoding="utf-8")
    assert "Completed" in said
    done = tunix_rt("evidence", "verify", tiny_bundle, "--json", **planted)
    assert done.returncode == 0, done.stderr
    assert leaks(said + done.stdout + done.stderr, tiny_run, tiny_bundle, tiny_replayable) == []
    assert leaks("", tiny_bundle.parent / "home") == [f".netrc: {NETRC}"], "the secrets were there to be found"


WRONG = {
    "an unknown key": (["--set", f"training.api_key={UNKNOWN_KEY}"], "training.api_key"),
    "an unknown section": (["--set", f"hub.token={UNKNOWN_KEY}"], "hub.token"),
    "no equals sign": (["--set", UNKNOWN_KEY], "--set"),
    "a wrong type": (["--set", f"training.seed={WRONG_TYPE}"], "training.seed"),
    "no choice": (["--set", f"training.device={WRONG_TYPE}"], "training.device"),
    "a flag": (["--device", WRONG_TYPE], "training.device"),
    "a flag for a number": (["--max-steps", WRONG_TYPE], "--max-steps"),
    "a word too many": ([UNKNOWN_KEY], "unexpected extra argument"),
    "a tag": (["--set", f"training.seed=!{WRONG_TYPE} 5"], "training.seed"),
    "a value like a token": (["--set", f"model.revision={LOOKS_LIKE_ONE}"], "model.revision"),
    "a token of the environment": (["--set", f"model.revision={IN_THE_ENVIRONMENT['KAGGLE_KEY']}"], "model.revision"),
    "an address with a password": (["--model", f"https://me:{USERINFO}@hub.example/o/m"], "model.model_name_or_path"),
    "a password without its scheme": (["--model", f"me:{USERINFO}@hub.example/o/m"], "model.model_name_or_path"),
    "an address with a query": (["--data", f"https://hub.example/d.jsonl?token={QUERY}"], "data.dataset"),
    "a path with a query": (["--data", f"d.jsonl?api_key={QUERY}"], "data.dataset"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_refused_command_names_the_setting_and_never_its_value(
    mistake: str, planted: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, by the program's own entry: a refusal needs no other."""
    for name, value in IN_THE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    arguments, named = WRONG[mistake]
    done = CliRunner().invoke(cli, ["train", "smoke_tiny", "--output", str(tmp_path / "run"), *arguments])
    assert done.exit_code == 2 and named in done.output
    assert leaks(done.output, tmp_path) == []


def test_a_configuration_with_an_unknown_key_is_refused_without_its_value(
    planted: dict[str, str], tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{model_name_or_path: tiny-gemma3}}\ntraining:\n  hub_token: {IN_A_FILE}\n")
    done = tunix_rt("train", config, "--output", tmp_path / "run", **planted)
    assert done.returncode == 2 and "training.hub_token" in done.stderr
    assert leaks(done.stdout + done.stderr) == [] and not (tmp_path / "run").exists()


@pytest.fixture
def hub() -> Iterator[str]:
    """A hub that refuses, and repeats whatever it was sent in headers, body and reason."""

    class Talkative(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            words = f"no: {SAID_BY_THE_HUB} {self.headers.get('Authorization', '')}"
            self.send_response(500, words)
            self.send_header("X-Error-Message", words)
            self.end_headers()
            self.wfile.write(words.encode())

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Talkative)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_what_a_hub_says_reaches_neither_the_screen_nor_the_failed_run(
    hub: str, planted: dict[str, str], tmp_path: Path
) -> None:
    named = planted | {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
    done = tunix_rt("train", "smoke_tiny", "--model", "owner/name", "--output", tmp_path / "run", *SMALL, **named)
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "run" / "result.json").is_file()
    assert leaks(done.stdout + done.stderr, tmp_path) == []


def test_a_defect_of_ours_is_told_without_secrets(planted: dict[str, str]) -> None:
    """Python would print the traceback as it is."""
    script = "import os; from tunix_rt.cli import main\n"
    script += "def fail(**_): raise RuntimeError('sent ' + os.environ['AWS_SECRET_ACCESS_KEY'])\n"
    script += "main.cli.main = fail\nmain.main()\n"
    asked = [command()[0], "-c", script]
    done = subprocess.run(asked, env=environment(**planted), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "RuntimeError: sent ***" in done.stderr
    assert leaks(done.stdout + done.stderr) == []


def test_variables_that_hold_no_secret_strike_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "tiny-gemma3 is trained")
    monkeypatch.setenv("SSH_KEY", "/home/me/.ssh/id_ed25519")
    monkeypatch.setenv("SORT_KEY", "gemma")
    said = "tiny-gemma3 is trained; /home/me/.ssh/id_ed25519; step 3: loss 2.1 @ 5e-4; see https://x.example/a?b=c"
    assert redacted(said) == said
