"""`everstep demo`."""
import click


@click.command("demo")
def demo_command() -> None:
    """See a program survive being killed."""
