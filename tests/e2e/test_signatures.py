"""Whoever signs a bundle is named by its verification, and nobody else. Keys and signatures are those of the real ssh-keygen."""

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tunix_rt.errors import ConfigError, EvidenceError, InputError
from tunix_rt.evidence.sign import MOST_BYTES, sign, signer_of
from tunix_rt.runs.checksums import SIGNATURE, SUMS, sums_text
from tunix_rt.storage import sha256_file

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def make_key(file: Path, *, passphrase: str = "", kind: str = "ed25519") -> Path:
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "alice@example.com", "-f", str(file)]
    subprocess.run(command, check=True, timeout=60)
    return file


def public(key: Path) -> Path:
    return key.with_name(f"{key.name}.pub")


def fingerprint(key: Path) -> str:
    return subprocess.run(
        ["ssh-keygen", "-l", "-f", str(key)], check=True, capture_output=True, text=True
    ).stdout.split()[1]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_key(folder / "alice")
    make_key(folder / "mallory")
    make_key(folder / "locked", passphrase="correct horse")
    return folder


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    (folder / "cpu").mkdir(parents=True)
    for name in ("run_manifest.json", "metrics.jsonl", "cpu/result.json"):
        (folder / name).write_text(f'{{"file": "{name}"}}\n')
    write_sums(folder)
    return folder


def write_sums(bundle: Path) -> None:
    names = [file.relative_to(bundle).as_posix() for file in bundle.rglob("*") if file.is_file()]
    hashed = {name: sha256_file(bundle / name) for name in names if name not in (SUMS, SIGNATURE)}
    (bundle / SUMS).write_text(sums_text(hashed))


@pytest.fixture
def signed(bundle: Path, keys: Path) -> Path:
    assert sign(bundle, keys / "alice") == bundle / SIGNATURE
    return bundle


def test_a_public_key_gives_the_fingerprint_of_the_signer_and_an_allowed_signers_file_the_name(
    signed: Path, keys: Path, tmp_path: Path
):
    found = signer_of(signed, public(keys / "alice"))
    assert found.signer == found.fingerprint == fingerprint(keys / "alice")
    assert found.sums_sha256 == hashlib.sha256((signed / SUMS).read_bytes()).hexdigest()
    allowed = tmp_path / "allowed_signers"
    mallory, alice = public(keys / "mallory").read_text(), public(keys / "alice").read_text()
    allowed.write_text(f'# reviewers\n\nm@example.com {mallory}a@example.com,alice namespaces="tunix-rt" {alice}')
    found = signer_of(signed, allowed)
    assert (found.signer, found.fingerprint) == ("a@example.com", fingerprint(keys / "alice"))


@pytest.mark.slow
def test_ssh_keygen_alone_verifies_the_same_signature(bundle: Path, tmp_path: Path):
    key = make_key(tmp_path / "key", kind="ecdsa")
    allowed = tmp_path / "allowed_signers"
    allowed.write_text(f"alice {public(key).read_text()}")
    command = ["ssh-keygen", "-Y", "verify", "-n", "tunix-rt", "-I", "alice", "-f", allowed, "-s", sign(bundle, key)]
    ended = subprocess.run(command, input=(bundle / SUMS).read_bytes(), capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_key_that_is_not_allowed_is_refused_by_its_fingerprint(signed: Path, keys: Path, tmp_path: Path):
    alice, mallory = public(keys / "alice").read_text(), public(keys / "mallory").read_text()
    for text in (
        mallory,
        f"alice@example.com {mallory}",
        f'alice namespaces="git" {alice}',
        f'alice valid-before="20200101" {alice}',
    ):
        (tmp_path / "signers").write_text(text)
        with pytest.raises(EvidenceError) as refused:
            signer_of(signed, tmp_path / "signers")
        assert fingerprint(keys / "alice") in refused.value.problem, text


def test_a_signature_of_other_hashes_or_for_another_program_does_not_hold(signed: Path, keys: Path):
    (signed / "metrics.jsonl").write_text('{"loss": 0.1}\n')
    write_sums(signed)
    with pytest.raises(EvidenceError, match=r"is not valid for SHA256SUMS: .*incorrect signature"):
        signer_of(signed, public(keys / "alice"))
    (signed / SIGNATURE).unlink()
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", keys / "alice", signed / SUMS]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(EvidenceError, match="namespace"):
        signer_of(signed, public(keys / "alice"))


def link(signature: Path) -> None:
    other = signature.with_name("elsewhere")
    other.write_bytes(signature.read_bytes())
    signature.unlink()
    signature.symlink_to(other)


def pipe(signature: Path) -> None:
    signature.unlink()
    os.mkfifo(signature)


TORN = b"-----BEGIN SSH SIGNATURE-----\nU1NIU0lHAAAAAf////8=\n-----END SSH SIGNATURE-----\n"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "absent": Path.unlink,
    "a link": link,
    "a pipe": pipe,
    "too long": lambda signature: signature.write_bytes(signature.read_bytes() + b"\n" * MOST_BYTES),
    "text": lambda signature: signature.write_bytes(b"\x1b[2J no signature"),
    "torn": lambda signature: signature.write_bytes(TORN),
    "of nothing": lambda signature: signature.with_name(SUMS).unlink(),
}


def test_a_bundle_without_a_readable_signature_is_refused(signed: Path, keys: Path, tmp_path: Path):
    for name, damage in DAMAGES.items():
        copy = shutil.copytree(signed, tmp_path / name)
        damage(copy / SIGNATURE)
        with pytest.raises(EvidenceError) as refused:
            signer_of(copy, public(keys / "alice"))
        assert refused.value.exit_code == 6
        assert refused.value.problem.isprintable(), name


@pytest.mark.slow
def test_a_file_without_a_valid_public_key_is_an_input_error(signed: Path, keys: Path, tmp_path: Path):
    alice = public(keys / "alice").read_text()
    file = tmp_path / "signers"
    for text in (
        None,
        "",
        "# nobody\n",
        f"alice@example.com\nalice {alice}",
        "ssh-ed25519 AAAAnokey\n",
        f"alice {alice}".replace("ssh-ed25519", "ssh-rsa"),
        (keys / "alice").read_text(),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(InputError, match="signers") as refused:
            signer_of(signed, file)
        assert "PRIVATE KEY" not in refused.value.problem


def test_signing_leaves_nothing_of_the_private_key_in_the_bundle(signed: Path, keys: Path):
    secret = [line for line in (keys / "alice").read_bytes().splitlines() if not line.startswith(b"-----")]
    assert len(secret) >= 4
    before = {"run_manifest.json", "metrics.jsonl", "cpu/result.json", SUMS}
    files = {file.relative_to(signed).as_posix(): file.read_bytes() for file in signed.rglob("*") if file.is_file()}
    assert set(files) == before | {SIGNATURE}
    for data in files.values():
        for text in (*secret, b"PRIVATE KEY", str(keys).encode(), b"alice"):
            assert text not in data
    with pytest.raises(InputError, match="inside the bundle"):
        sign(signed, make_key(signed / "cpu" / "key"), overwrite=True)


@pytest.mark.slow
def test_a_signature_is_replaced_on_request_only_and_by_a_valid_one_only(signed: Path, keys: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="exists"):
        sign(signed, keys / "mallory")
    lonely = shutil.copy(public(keys / "mallory"), tmp_path / "lonely.pub")  # its private key is not beside it
    for key in (tmp_path / "no-key", lonely):
        with pytest.raises(InputError, match="does not sign"):
            sign(signed, key, overwrite=True)
    assert signer_of(signed, public(keys / "alice"))
    sign(signed, keys / "mallory", overwrite=True)
    assert signer_of(signed, public(keys / "mallory"))
    (signed / SUMS).unlink()
    with pytest.raises(InputError, match="SHA256SUMS: missing"):
        sign(signed, keys / "alice", overwrite=True)


@pytest.mark.slow
def test_a_key_with_a_passphrase_never_prompts_and_signs_through_the_agent(
    bundle: Path, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompted, askpass, socket = tmp_path / "prompted", tmp_path / "askpass", tmp_path / "agent"
    askpass.write_text(f"#!/bin/sh\ntouch {prompted}\necho correct horse\n")
    askpass.chmod(0o755)
    for name, value in {"SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    with pytest.raises(InputError, match="passphrase") as refused:
        sign(bundle, keys / "locked")
    assert time.monotonic() - started < 8
    assert "ssh-add" in refused.value.fix
    assert not prompted.exists()
    assert not (bundle / SIGNATURE).exists()
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            assert time.monotonic() - started < 20
            time.sleep(0.02)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        subprocess.run(["ssh-add", str(keys / "locked")], check=True, capture_output=True, timeout=20)
        sign(bundle, keys / "locked")
    finally:
        agent.terminate()
        agent.wait()
    assert signer_of(bundle, public(keys / "locked")).fingerprint == fingerprint(keys / "locked")


def test_without_ssh_keygen_the_package_to_install_is_named(signed: Path, keys: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for act in (
        lambda: sign(signed, keys / "alice", overwrite=True),
        lambda: signer_of(signed, public(keys / "alice")),
    ):
        with pytest.raises(InputError) as refused:
            act()
        assert refused.value.exit_code == 3
        assert "openssh-client" in refused.value.fix
