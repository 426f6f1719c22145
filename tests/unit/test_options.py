# SPDX-License-Identifier: BSD-3-Clause
"""URLs and transport options (T-1, T-3)."""

from __future__ import annotations

import pickle
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from kombu_pgqueue.errors import ConfigurationError
from kombu_pgqueue.options import FOREIGN, KNOWN, Options, parse_url, safe_uri
from kombu_pgqueue.url import SafeUrl, mask, reveal, url_of_parts

HARD = "@ : / % ; [ # ? & + = é '\" \\"


def parts(url: str) -> dict[str, object]:
    return conninfo_to_dict(parse_url(url).conninfo)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("pgqueue://host/db", {"host": "host", "dbname": "db"}),
        ("pgqueue://u@h:5433/db", {"user": "u", "host": "h", "port": "5433", "dbname": "db"}),
        (
            "pgqueue://u:p@h1:1,h2:2/db?target_session_attrs=read-write",
            {"host": "h1,h2", "port": "1,2", "target_session_attrs": "read-write"},
        ),
        ("pgqueue://h/db?sslmode=verify-full&sslrootcert=/a%20b", {"sslrootcert": "/a b"}),
        ("pgqueue:///db?host=/run/pg", {"host": "/run/pg", "dbname": "db"}),
        ("pgqueue://%2Frun%2Fpg/db", {"host": "/run/pg"}),
        ("pgqueue://[2001:db8::1]:6000/db", {"host": "2001:db8::1", "port": "6000"}),
        ("pgqueue://?service=x", {"service": "x"}),
        ("pgqueue://h/db?options=-c%20geqo%3Doff", {"options": "-c geqo=off"}),
        ("pgqueue://h/db?application_name=a+b", {"application_name": "a+b"}),
    ],
)
def test_libpq_gets_what_the_url_says(url: str, expected: dict[str, str]) -> None:  # T-1
    assert expected.items() <= parts(url).items()


@given(password=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_encoded_password_comes_through_and_never_shows(password: str) -> None:  # T-1
    password = f"§{password}§"
    url = f"pgqueue://u:{quote(password, safe='')}@h/db"
    options = parse_url(url)
    assert conninfo_to_dict(options.conninfo).get("password", "") == password
    assert "password" not in repr(options)
    assert password not in repr(options)
    assert quote(password, safe="") not in safe_uri(url)
    assert str(SafeUrl(url)) == safe_uri(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("pgqueue://u:p@h/db", "pgqueue://u:**@h/db"),
        ("pgqueue://u:p@ss/w@h1:1,h2:2/db", "pgqueue://u:**@h1:1,h2:2/db"),
        ("pgqueue://h/db?user=u&password=secret", "pgqueue://h/db?user=u&password=**"),
        (
            "pgqueue://h/db?sslpassword=s&sslmode=require",
            "pgqueue://h/db?sslpassword=**&sslmode=require",
        ),
        ("pgqueue://u:a@h/x;pgqueue://u:b@h/y", "pgqueue://u:**@h/x;pgqueue://u:**@h/y"),
        ("pgqueue://h/db", "pgqueue://h/db"),
        ("redis://:secret@h/0", "redis://:**@h/0"),
        ("pgqueue://u:p@[::1]:5,h2/db", "pgqueue://u:**@[::1]:5,h2/db"),
        # Not encoded: whole, and in the pieces that kombu cuts at the ";".
        ("pgqueue://u:p@ss:w/rd%;[#@h/x", "pgqueue://u:**@h/x"),
        ("pgqueue://u:p@ss:w/rd%", "pgqueue://u:**@**"),
        ("[#@h/x", "**@h/x"),
    ],
)
def test_masking(url: str, shown: str) -> None:
    assert safe_uri(url) == shown


def test_own_options_in_the_query_and_in_the_mapping() -> None:
    options = parse_url(
        "pgqueue://h/db?schema=jobs&poll_interval=2&use_notify=no&max_claim_bytes=1000",
        {"poll_interval": 3, "lease_ttl": 5.5},
    )
    assert options.schema == "jobs"
    assert options.poll_interval == 3
    assert options.use_notify is False
    assert options.max_claim_bytes == 1000
    assert options.lease_ttl == 5.5
    assert "schema" not in conninfo_to_dict(options.conninfo)


def test_the_connect_timeout_of_kombu_is_the_weakest() -> None:
    assert parse_url("pgqueue://h/db").connect_timeout == 5
    assert parse_url("pgqueue://h/db", connect_timeout=4).connect_timeout == 4
    assert parse_url("pgqueue://h/db?connect_timeout=3", connect_timeout=4).connect_timeout == 3
    assert (
        parse_url("pgqueue://h/db?connect_timeout=3", {"connect_timeout": 2}).connect_timeout == 2
    )


def test_retry_policies_that_kombu_merges_pass() -> None:  # T-3
    given_by_kombu = dict.fromkeys(FOREIGN, 1)
    assert parse_url("pgqueue://h/db", given_by_kombu) == parse_url("pgqueue://h/db")


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("pgqueue://h/db", {"pol_interval": 1}, "pol_interval"),
        ("pgqueue://h/db", {"poll_interval": "soon"}, "poll_interval"),
        ("pgqueue://h/db", {"poll_interval": True}, "poll_interval"),
        ("pgqueue://h/db", {"auto_migrate": "perhaps"}, "auto_migrate"),
        ("pgqueue://h/db", {"visibility_timeout": -1}, "visibility_timeout"),
        ("pgqueue://h/db?schema=", None, "schema"),
        ("pgqueue://h/db?publish_synchronous_commit=maybe", None, "publish_synchronous_commit"),
        ("pgqueue-embedded:///p?sslmode=require", None, "sslmode"),
    ],
)
def test_a_wrong_option_is_named_and_the_known_ones_are_listed(
    url: str, options: dict[str, object] | None, named: str
) -> None:  # T-3
    with pytest.raises(ConfigurationError) as caught:
        parse_url(url, options)
    assert repr(named) in str(caught.value)
    assert all(known in str(caught.value) for known in KNOWN)


@pytest.mark.parametrize(
    "url",
    [
        "pgqueue://u:sesame@h:port/db",
        "pgqueue://u:sesame@h/db?nosuchoption=1",
        "pgqueue://u:sesame@[h/db",
        "pgqueue-embedded://relative/path",
        "pgqueue-embedded:///",
        "postgresql://u:sesame@h/db",
        "nonsense",
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_url(url)
    assert "sesame" not in str(caught.value)


def test_embedded() -> None:
    options = parse_url("pgqueue-embedded:///var/lib/a%20b?schema=jobs")
    assert options.embedded_path == "/var/lib/a b"
    assert options.conninfo == ""
    assert options.schema == "jobs"
    assert options.with_conninfo("host=/x").conninfo == "host=/x"


def test_options_are_hashable_and_equal_by_value() -> None:
    assert {parse_url("pgqueue://h/db"), parse_url("pgqueue://h/db")} == {
        parse_url("pgqueue://h/db")
    }
    assert isinstance(parse_url("pgqueue://h/db"), Options)


def test_a_safe_url_is_what_it_hides() -> None:
    safe = SafeUrl("pgqueue://u:p@h/db")
    assert safe == "pgqueue://u:p@h/db"
    assert safe != SafeUrl("pgqueue://u:q@h/db")
    assert reveal(pickle.loads(pickle.dumps(safe))) == "pgqueue://u:p@h/db"
    assert SafeUrl(safe) is safe
    assert f"{safe}" == "pgqueue://u:**@h/db"


@pytest.mark.parametrize("tail", ["ZZ%;[#@h/x", "ZZ%", "ZZ@h/x", "ZZ@h:99999/x"])
def test_a_url_that_its_password_breaks_is_refused_without_showing_it(tail: str) -> None:  # T-1
    with pytest.raises(ConfigurationError, match="percent-encode") as refused:
        parse_url(f"pgqueue://u:p@XX:YY/{tail}")
    assert not {"X", "Y", "Z"} & set(str(refused.value))


def test_messages_of_others_lose_the_password() -> None:
    assert (
        mask("failed: pass/word and pass%2Fword", "pgqueue://u:pass%2Fword@h/db")
        == "failed: ** and **"
    )


@given(
    user=st.text(min_size=1, max_size=9).filter(lambda t: "\0" not in t and t.isprintable()),
    password=st.sampled_from([HARD, "plain"]),
    database=st.sampled_from(["db", "d/b", "d b"]),
)
def test_pieces_make_the_url_they_came_from(user: str, password: str, database: str) -> None:
    url = url_of_parts("pgqueue", host="h", port=5, user=user, password=password, database=database)
    found = parts(url)
    assert (found["user"], found["password"], found["dbname"], found["port"]) == (
        user,
        password,
        database,
        "5",
    )
