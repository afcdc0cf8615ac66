"""Secrets where people leave them: in the environment of every shared run, and in what the tests of secrets ask for."""

from pathlib import Path

IN_THE_ENVIRONMENT = {
    "HF_TOKEN": "hf_" + "EnvironmentHubTokenAbCdEfGhIjKl",
    "HUGGING_FACE_HUB_TOKEN": "older-hub-token-5f1c",
    "WANDB_API_KEY": "7b1f0c9a4e2d4c5f8a6b3d2e1f0a9b8c7d6e5f40",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYPLANTED",
    "GITHUB_TOKEN": "ghp_" + "PlantedGithubTokenAbCdEfGhIjKlMnOp12",
    "KAGGLE_KEY": "4d2c6b8a0f1e3c5d7b9a2f4e6c8d0b1a",
}
NETRC = "password-in-netrc-7726"


def planted_home(home: Path) -> dict[str, str]:
    """The environment of somebody who has logged in everywhere, whose home is made at `home`."""
    home.mkdir(parents=True, exist_ok=True)
    (home / ".netrc").write_text(f"machine 127.0.0.1 login me password {NETRC}\n")
    (home / ".netrc").chmod(0o600)
    return {**IN_THE_ENVIRONMENT, "HOME": str(home), "HF_HOME": str(home / "hub")}
