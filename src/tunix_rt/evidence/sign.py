"""Signatures with `ssh-keygen -Y`: `SHA256SUMS.sig` covers SHA256SUMS, which covers every file of the bundle.

The tool reads SHA256SUMS from stdin and writes to stdout: it never opens a file of the bundle.
"""

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tunix_rt.errors import ConfigError, EvidenceError, InputError
from tunix_rt.evidence.sandbox import Limits, run_limited
from tunix_rt.runs.checksums import SIGNATURE, SUMS, read_file
from tunix_rt.runs.record import MOST_SUMS
from tunix_rt.storage import storage, write_text

NAMESPACE = "tunix-rt"
MOST_BYTES = 64 * 2**10
"""Of a signature, and of a file that names signers."""
LIMITS = Limits(wall_seconds=10.0, cpu_seconds=10, address_bytes=2**30, file_bytes=2**20, open_files=64)
_KEY = re.compile(r"(?<!\S)(?:ssh|ecdsa|sk)-[\w.@-]+\s+AAAA\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A valid signature."""

    signer: str
    """The principal of the allowed-signers file; the fingerprint where a public key was given."""
    fingerprint: str
    """`SHA256:...`, as `ssh-keygen -l` prints it."""
    sums_sha256: str
    """Of the SHA256SUMS that is signed. A folder may change between two reads: compare it with the one that was checked."""


def sign(bundle: Path, key: Path, *, overwrite: bool = False) -> Path:
    """Sign SHA256SUMS with the private key `key`, or with the key of that name in the SSH agent."""
    sums, problem = read_file(bundle, SUMS, MOST_SUMS)
    if sums is None:
        raise InputError(f"{bundle} cannot be signed: {problem}", fix="name a bundle of `tunix-rt evidence collect`")
    signature = bundle / SIGNATURE
    if os.path.lexists(signature) and not overwrite:
        raise ConfigError(f"{signature} exists", fix="pass --overwrite to replace the signature")
    if key.resolve().is_relative_to(bundle.resolve()):
        raise InputError(f"{key} is inside the bundle", fix="move the key out of it and collect the bundle again")
    good, out, err = _ssh_keygen("-Y", "sign", "-n", NAMESPACE, "-f", str(key.absolute()), stdin=sums)
    if not good:
        raise InputError(
            f"{key} does not sign: {err}",
            fix="name a private SSH key that only you can read (chmod 600); for one with a passphrase run `ssh-add` first",
        )
    write_text(signature, f"{out}\n")
    return signature


def signer_of(bundle: Path, signed_by: Path) -> Signature:
    """Who signed the bundle, among those in `signed_by`: a public key (`ssh-ed25519 AAAA...`) or an allowed-signers file.

    EvidenceError if nobody of them did, or SHA256SUMS is not what was signed.
    """
    allowed, named = _allowed_signers(signed_by)
    sums, problem = read_file(bundle, SUMS, MOST_SUMS)
    signature, unsigned = read_file(bundle, SIGNATURE, MOST_BYTES)
    if sums is None or signature is None:
        fix = "get a signed bundle, or verify without --signed-by"
        raise EvidenceError(f"{bundle} is not signed: {problem or unsigned}", fix=fix)
    with storage(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory(prefix="tunix-rt-signature-") as folder:
        signers, copy = Path(folder) / "allowed_signers", Path(folder) / SIGNATURE
        signers.write_text(allowed, encoding="utf-8")
        copy.write_bytes(signature)
        files = ("-s", str(copy), "-f", str(signers))
        good, out, err = _ssh_keygen("-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(copy), stdin=sums)
        if not good:
            fix = "get the bundle again from the signer: it changed after signing, or was signed for another purpose"
            raise EvidenceError(f"{bundle}: the signature is not valid for {SUMS}: {err}", fix=fix)
        fingerprint = out.split()[-1]
        good, out, err = _ssh_keygen("-Y", "find-principals", *files)
        principal = out.partition("\n")[0]
        if good:
            good, _, err = _ssh_keygen("-Y", "verify", "-n", NAMESPACE, "-I", principal, *files, stdin=sums)
    if not good:
        raise EvidenceError(
            f"{bundle} is signed by {fingerprint}, which {signed_by} does not allow: {err.replace(str(signers), 'line')}",
            fix="obtain the signer's public key from the signer; do not trust the bundle until it verifies",
        )
    signer = principal if named else fingerprint
    return Signature(signer=signer, fingerprint=fingerprint, sums_sha256=hashlib.sha256(sums).hexdigest())


def _allowed_signers(signed_by: Path) -> tuple[str, bool]:
    """The text of an allowed-signers file, and whether `signed_by` is one; a public key signs for anyone."""
    data, problem = read_file(signed_by.resolve().parent, signed_by.resolve().name, MOST_BYTES)
    lines = [line.strip() for line in (data or b"").decode("utf-8", errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    keys = [found[0] for line in lines if (found := _KEY.search(line))]
    valid = len(_ssh_keygen("-l", "-f", "-", stdin="\n".join(keys).encode())[1].splitlines()) if keys else 0
    if not valid or valid < len(lines):
        raise InputError(
            f"signers {signed_by}: {problem or f'{valid} of {len(lines)} lines contain a valid public key'}",
            fix="name a public key (`ssh-ed25519 AAAA... comment`) or an allowed-signers file (`alice@example.com "
            "ssh-ed25519 AAAA...`)",
        )
    named = any(not line.startswith(key) for line, key in zip(lines, keys, strict=True))
    return "".join(f"{line}\n" if named else f"signer {line}\n" for line in lines), named


def _ssh_keygen(*arguments: str, stdin: bytes = b"") -> tuple[bool, str, str]:
    """Whether it succeeds, its output and its last error line. It has no terminal and no askpass program: it fails rather
    than prompts."""
    environment = {"LC_ALL": "C", "SSH_ASKPASS_REQUIRE": "never"}
    environment |= {name: os.environ[name] for name in ("PATH", "SSH_AUTH_SOCK") if name in os.environ}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            ended = run_limited(
                ["ssh-keygen", *arguments], limits=LIMITS, environment=environment, folder=Path("/"), stdin=stdin,
                stdout=out, stderr=err,
            )  # fmt: skip
        except OSError as error:
            fix = "install the package openssh-client"
            raise InputError(f"ssh-keygen, which signatures need, does not start: {error.strerror}", fix=fix) from error
        printed, failed = (os.pread(one.fileno(), MOST_BYTES, 0).decode(errors="replace").strip() for one in (out, err))
        reason = f"it reached {ended.breach}" if ended.breach else failed.rpartition("\n")[2]
        return ended.code == 0, printed, "".join(filter(str.isprintable, reason))[:200]
