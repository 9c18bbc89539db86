"""The tables of docs/OPERATIONS.md that the code knows best.

`python -m tests.unit.operations_tables` writes them into the page.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import cloup

from protocol.log_lines import Sentence
from ps.monitoring import log_events as ps_log
from ps.settings import command_line as ps_command
from worker import command_line as worker_command
from worker import log_format as worker_log

PAGE = Path(__file__).resolve().parents[2] / "docs" / "OPERATIONS.md"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _row(*cells: str) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _default(option: click.Option) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    return str(option.default)


def _option_row(option: click.Option) -> str:
    names = " ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    kind = "" if option.is_flag else option.make_metavar(click.Context(click.Command("none")))
    variable = option.envvar if isinstance(option.envvar, str) else ""
    return _row(f"{names} {kind}".strip(), f"`{variable}`", _default(option), option.help or "")


def options_table(command: cloup.Command | cloup.Group) -> str:
    """Return all options of a command that have a group, group by group."""
    lines: list[str] = []
    for group in command.option_groups:
        lines += [f"**{group.title}**", "", _row("option", "variable", "default", "meaning"), "|---|---|---|---|"]
        lines += [_option_row(option) for option in group.options if isinstance(option, click.Option)]
        lines.append("")
    return "\n".join(lines).strip()


def events_table(sentences: Sequence[Sentence]) -> str:
    """Return the events of one side."""
    lines = [_row("event", "what it means", "what to do"), "|---|---|---|"]
    return "\n".join([*lines, *(_row(f"`{row.event}`", row.meaning, row.advice) for row in sentences)])


def server_command() -> Any:
    """Return the server's command, which runs nothing."""
    return ps_command.build_command(lambda _: 0, lambda _: 0)


def worker_command_of() -> Any:
    """Return the worker's command, which runs nothing."""
    return worker_command.build_command(lambda _: 0)


TABLES: dict[str, Callable[[], str]] = {
    "options of the server": lambda: options_table(server_command()),
    "options of a worker": lambda: options_table(worker_command_of()),
    "events of the server": lambda: events_table(ps_log.EVENTS),
    "events of a worker": lambda: events_table(worker_log.EVENTS),
}
"""What stands between the markers of each name."""


def between(name: str) -> re.Pattern[str]:
    """Return a pattern with what stands between the markers of a table as its second group."""
    begin, end = re.escape(f"<!-- begin: {name} -->"), re.escape(f"\n<!-- end: {name} -->")
    return re.compile(f"({begin})(.*?)({end})", re.DOTALL)


def written_anew(text: str) -> str:
    """Return the page with all tables as the code has them now."""
    for name, make in TABLES.items():
        match = between(name).search(text)
        assert match is not None, f"the markers of {name!r} are not there"
        text = f"{text[: match.start()]}{match[1]}\n{make()}{match[3]}{text[match.end() :]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text()))
