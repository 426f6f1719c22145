# SPDX-License-Identifier: BSD-3-Clause
"""`celery -A proj dead-letter`: what will not run again by itself, and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from itertools import islice
from typing import Any

import click

from celery_ext.cli.common import (
    REFUSED,
    CommandFailed,
    clear_errors,
    format_option,
    moment,
    to_json,
)
from celery_ext.cli.content import arguments_of, columns_of
from celery_ext.cli.table import colours, one_line, render
from celery_ext.dead_letter import DeadLetterQueue, Filter
from kombu_pgqueue.values import DeadLetter
from kombu_pgqueue.verdicts import FAILURE_CODES


@click.group("dead-letter")
def dead_letter() -> None:
    """Dead letters: jobs that failed for good, kept to be looked at and replayed.

    Exit status: 0 done; 1 something was refused; 2 settings, broker or database.
    """


def _filters(function: Callable[..., Any]) -> Callable[..., Any]:
    # Decorators stack: the last one applied stands first in the help.
    for option in (
        click.option("--until", callback=moment, help="Last failed before: ISO 8601, or 1h."),
        click.option("--since", callback=moment, help="Last failed at or after: ISO 8601, or 2d."),
        click.option(
            "--code",
            type=click.Choice(sorted(FAILURE_CODES)),
            metavar="CODE",
            help="Only with this failure code: " + ", ".join(sorted(FAILURE_CODES)) + ".",
        ),
        click.option("--task-id", help="Only of this task id."),
        click.option("--task", help="Only of this task, by its registered name."),
        click.option("--queue", help="Only of this queue."),
    ):
        function = option(function)
    return function


@dead_letter.command("list")
@_filters
@click.option(
    "--state",
    type=click.Choice(["open", "resolved", "all"]),
    default="open",
    show_default=True,
    help="Open ones wait for a decision.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="At most so many, latest failure first; 0: all.",
)
@format_option
@click.pass_context
@clear_errors
def list_(ctx: click.Context, form: str, state: str, limit: int, **conditions: Any) -> None:
    """List dead letters, the latest failure first.

    JSON is an array of objects keyed by the columns of job_dead_letter: times are ISO 8601, the
    envelope is text, the body is base64 of the raw bytes.
    """
    which = Filter(state=state, **conditions)
    with DeadLetterQueue.of(ctx.obj.app) as queue:
        # One more than asked for tells whether there are more.
        letters = list(islice(queue.list(which, limit=limit + 1 if limit else None), None))
    more = bool(limit) and len(letters) > limit
    letters = letters[:limit] if more else letters
    if form == "json":
        click.echo(to_json([columns_of(letter) for letter in letters]))
    elif letters:
        click.echo(_table(ctx, letters, resolved_too=state != "open"))
    else:
        click.echo("no dead letters", err=True)
    if more:
        click.echo(f"there are more than {limit}: raise --limit, or 0 for all", err=True)
    _warn_without_setup(ctx.obj.app)


@dead_letter.command()
@click.argument("dead_letter_id", type=int, metavar="ID")
@format_option
@click.pass_context
@clear_errors
def show(ctx: click.Context, dead_letter_id: int, form: str) -> None:
    """Show one dead letter: why it died, its arguments, its traceback."""
    app = ctx.obj.app
    with DeadLetterQueue.of(app) as queue:
        letter = queue.get(dead_letter_id)
    if letter is None:
        click.echo(f"{dead_letter_id}: not found", err=True)
        ctx.exit(REFUSED)
    arguments, problem = arguments_of(letter, app.conf.accept_content)
    if form == "json":
        decoded = {"arguments": arguments, "arguments_error": problem}
        click.echo(to_json({**columns_of(letter), **decoded}))
        return
    for line in _story(letter, arguments, problem):
        click.echo(line)


#: What a verb answers when it was done.
_PAST = {"replay": "replayed", "discard": "discarded"}


def _resolving(verb: str, doc: str) -> None:
    @dead_letter.command(verb, help=doc)
    @click.argument("ids", type=int, nargs=-1, metavar="[ID]...")
    @_filters
    @click.option("--all", "everything", is_flag=True, help="Every open dead letter.")
    @click.option("--dry-run", is_flag=True, help="Only say what would be done.")
    @click.option("--yes", "-y", is_flag=True, help="Do not ask.")
    @click.option("--note", help="Kept with the resolution.")
    @format_option
    @click.pass_context
    @clear_errors
    def command(
        ctx: click.Context,
        ids: tuple[int, ...],
        everything: bool,
        dry_run: bool,
        yes: bool,
        note: str | None,
        form: str,
        **conditions: Any,
    ) -> None:
        which = Filter(**conditions)
        _check_selection(ids, everything, which)
        with DeadLetterQueue.of(ctx.obj.app) as queue:
            chosen = list(dict.fromkeys(ids)) if ids else queue.select(which)
            if not ids and not dry_run and not yes and chosen:
                _confirm(verb, len(chosen))
            act = _foretell if dry_run else _do
            results: list[tuple[int, str]] = []
            try:
                for number in chosen:
                    results.append((number, act(queue, verb, number, note)))
            except BaseException:
                # Cut off, by Ctrl-C or the database: what was done by then is done.
                if results:
                    _tell(results, _PAST[verb], dry_run, form)
                    click.echo(f"stopped: {len(chosen) - len(results)} not reached", err=True)
                raise
        _tell(results, _PAST[verb], dry_run, form)
        if any(result != _PAST[verb] for _, result in results):
            ctx.exit(REFUSED)


_resolving(
    "replay",
    "Queue dead letters again, each under its own id with its message byte for byte.\n\n"
    "Name ids, or select open ones by filters or --all. What is already resolved is refused.",
)
_resolving(
    "discard",
    "Close dead letters for good; they stay listed as resolved until retention prunes them.\n\n"
    "Name ids, or select open ones by filters or --all. What is already resolved is refused.",
)


@dead_letter.command()
@format_option
@click.pass_context
@clear_errors
def health(ctx: click.Context, form: str) -> None:
    """How many are open, for which reasons, since when."""
    with DeadLetterQueue.of(ctx.obj.app) as queue:
        found = queue.health()
    if form == "json":
        click.echo(to_json(found))
        return
    codes = dict(found.get("by_failure_code") or {})
    rows = [("open", found.get("open_count_job"))]
    rows += [(f"open: {code}", count) for code, count in sorted(codes.items())]
    rows.append(("oldest first failed", _time(found.get("oldest_first_failed_at"))))
    click.echo(render(("dead letters", ""), rows, bold=colours(ctx)))
    _warn_without_setup(ctx.obj.app)


def _check_selection(ids: tuple[int, ...], everything: bool, which: Filter) -> None:
    if ids and (everything or not which.selects_all):
        raise click.UsageError("name ids, or select by filters or --all: not both")
    if not ids and not everything and which.selects_all:
        raise click.UsageError("name ids, a filter such as --task, or --all")


def _confirm(verb: str, count: int) -> None:
    if not sys.stdin.isatty():
        raise CommandFailed(f"to {verb} {count} dead letters unasked, say --yes")
    click.confirm(f"{verb} {count} dead letters?", abort=True)


def _do(queue: DeadLetterQueue, verb: str, number: int, note: str | None) -> str:
    return queue.replay(number, note=note) if verb == "replay" else queue.discard(number, note=note)


def _foretell(queue: DeadLetterQueue, verb: str, number: int, note: str | None) -> str:
    letter = queue.get(number)
    if letter is None:
        return "not_found"
    return _PAST[verb] if letter.resolved_at is None else "already_resolved"


def _tell(results: list[tuple[int, str]], past: str, dry_run: bool, form: str) -> None:
    done = sum(result == past for _, result in results)
    would = "would be " if dry_run else ""
    if form == "json":
        rows = [
            {"dead_letter_id": number, "result": result, "dry_run": dry_run}
            for number, result in results
        ]
        click.echo(to_json(rows))
    else:
        for number, result in results:
            if result == past:
                click.echo(f"{number}: {would}{past}")
            else:
                click.echo(f"{number}: {would}refused: {result.replace('_', ' ')}", err=True)
        if len(results) != 1:
            click.echo(f"{done} {would}{past}, {len(results) - done} refused")


def _warn_without_setup(app: Any) -> None:
    if not hasattr(app, "pgqueue_retry_policy"):
        click.echo(
            f"app {app.main or app!r} was not given to celery_ext.setup(app): a task that fails "
            "in its workers leaves no dead letter",
            err=True,
        )


def _table(ctx: click.Context, letters: list[DeadLetter], *, resolved_too: bool) -> str:
    state = ("STATE",) if resolved_too else ()
    head = ("ID", "TASK", "QUEUE", *state, "CODE", "ATTEMPTS", "LAST FAILED", "ERROR")
    rows = [
        (
            letter.dead_letter_id,
            letter.job_kind,
            letter.event_domain,
            *((letter.resolution or "open",) if resolved_too else ()),
            letter.failure_code,
            letter.attempts,
            letter.last_failed_at,
            letter.last_error,
        )
        for letter in letters
    ]
    return render(head, rows, bold=colours(ctx))


def _story(letter: DeadLetter, arguments: Any, problem: str | None) -> list[str]:
    detail = dict(letter.failure_detail)
    trace = detail.pop("traceback", None)
    facts: dict[str, Any] = {
        "dead letter": letter.dead_letter_id,
        "previous": letter.previous_id,
        "task": letter.job_kind,
        "task id": letter.job_snapshot.get("task_id"),
        "job": letter.job_id,
        "queue": letter.event_domain,
        "failure": letter.failure_code,
        "error": letter.last_error,
        "attempts": letter.attempts,
        "executor": letter.executor,
        "first failed": letter.first_failed_at,
        "last failed": letter.last_failed_at,
        "resolution": letter.resolution,
        "resolved by": letter.resolved_by,
        "resolved at": letter.resolved_at,
        "note": letter.resolution_note,
    }
    detail.pop("message", None)  # is the error
    facts.update({name.replace("_", " "): value for name, value in detail.items()})
    known = [(name, value) for name, value in facts.items() if value is not None]
    width = max(len(name) for name, _ in known)
    lines = [f"{name.ljust(width)}  {_fact(value)}" for name, value in known]
    if arguments is None:
        lines.append(f"{'arguments'.ljust(width)}  not readable: {one_line(problem or '')}")
    else:
        lines.append(f"{'args'.ljust(width)}  {one_line(repr(arguments['args']))}")
        lines.append(f"{'kwargs'.ljust(width)}  {one_line(repr(arguments['kwargs']))}")
    if trace:
        lines += ["", *(one_line_keeping_indent(line) for line in str(trace).splitlines())]
    return lines


def _time(value: Any) -> Any:
    """A time out of PostgreSQL's JSON as a datetime; what cannot be read so, unchanged."""
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return value


def _fact(value: Any) -> str:
    if isinstance(value, datetime):
        return value.astimezone().isoformat(sep=" ", timespec="seconds")
    return one_line(str(value))


def one_line_keeping_indent(line: str) -> str:
    """A traceback's line, its indentation kept."""
    return line[: len(line) - len(line.lstrip())] + one_line(line.strip())
