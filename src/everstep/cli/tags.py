"""Tags on the command line."""

import click


def parsed_tags(tags: tuple[str, ...]) -> dict[str, str]:
    """Return `name=value` texts as a dict."""
    parsed = {}
    for tag in tags:
        name, equals, value = tag.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{tag!r} is not NAME=VALUE.", param_hint="--tag")
        parsed[name] = value
    return parsed
