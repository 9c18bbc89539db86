"""How a group of packages is installed that not everybody needs, for messages that name what is missing."""


def installing(extra: str) -> str:
    """Return the commands that install a group of `pyproject.toml`: of an installed package, and of a checkout.

    Args:
        extra: name of the group, such as `metrics`.
    """
    return f"pip install 'weighmaster[{extra}]', in a checkout .venv/bin/pip install -e '.[{extra}]'"
