"""`tunix-rt completion`: the script that makes a shell complete verbs and options."""

import click

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_TUNIX_RT_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of SHELL: bash, zsh or fish.

    \b
    bash:  tunix-rt completion bash >> ~/.bashrc
    zsh:   tunix-rt completion zsh >> ~/.zshrc
    fish:  tunix-rt completion fish > ~/.config/fish/completions/tunix-rt.fish
    """
    from click.shell_completion import get_completion_class

    from tunix_rt.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None  # click has these three
    made = kind(cli, {}, "tunix-rt", VARIABLE)
    click.echo(made.source_template % made.source_vars())
