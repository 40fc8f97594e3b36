"""Files on a real S3 server: reading, listing, writing whole or not at all, and what is said when something is wrong."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from nestpipe.files import FileError, Location, Unreachable, systems
from nestpipe.files import patience as waiting
from nestpipe.files.url import Url
from object_storage import Server, serving


@pytest.fixture(scope="module")
def bucket(storage: Server) -> str:
    return storage.bucket("files")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(waiting, "_limit", 1.0)
    yield


def test_reading_at_any_place(bucket: str) -> None:
    """A remote file is read as a local one: size, version, seek, read."""
    data = os.urandom(20_000_000)  # more than a piece
    place = Location(f"{bucket}/deep/down/a.bin")
    with place.upload() as upload:
        upload.write(data)
    assert place.size() == len(data) and place.read() == data and place.is_file() and not place.is_folder()
    with place.open() as file:
        file.seek(19_999_990)
        assert file.read() == data[-10:] and file.read(1) == b""
        assert file.read_at(7, 100) == data[100:107]
    before = place.version()
    place.write(b"other")
    assert place.version() != before and str(place) == place.name


def test_listing(bucket: str) -> None:
    """Entries of a folder have names relative to it; a folder that is not there has none."""
    for name in ("one", "two/three"):
        Location(f"{bucket}/listed/{name}").write(b"12")
    folder = Location(f"{bucket}/listed")
    assert [(e.name, e.is_file, e.size) for e in folder.entries() if e.is_file] == [("one", True, 2)]
    assert [e.name for e in folder.entries(deep=True) if e.is_file] == ["one", "two/three"]
    assert folder.sizes(["one", "none", "two/three"]) == [2, None, 2]
    assert Location(f"{bucket}/nothing").entries() == [] and (folder / "two").is_folder()
    (folder / "one").remove()
    (folder / "one").remove()
    folder.remove_folder()
    folder.remove_folder()
    assert folder.entries() == []


def test_an_upload_that_is_not_completed_leaves_no_object(storage: Server, bucket: str) -> None:
    """Neither an exception nor forgetting the upload makes half a file."""
    data = b"x" * 12_000_000
    with pytest.raises(KeyError), Location(f"{bucket}/half/raised").upload() as upload:
        upload.write(data)
        raise KeyError
    Location(f"{bucket}/half/forgotten").upload().write(data)
    gc.collect()
    assert storage.keys("files", "half/") == []


def test_options_in_the_url(storage: Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may stand in the URL instead of the environment, and stays there below a folder."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    place = Location(f"{bucket}/here?endpoint_override=127.0.0.1:{storage.port}&scheme=http")
    (place / "file").write(b"1")
    assert (place / "file").name == f"{bucket}/here/file?endpoint_override=127.0.0.1:{storage.port}&scheme=http"
    assert (place / "file").read() == b"1" and (place / "file").parent == place and (place / "file").leaf == "file"
    with pytest.raises(ValueError, match="no option 'colour'; there are region"):
        Location("s3://files/x?colour=red").size()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", storage.endpoint)
    assert Location(f"{bucket}/here/file").size() == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ftp://host/x", "no file system 'ftp'"),
        ("s3:///x", "names no bucket"),
        ("s3://key:secret@files/x", "ends up in logs"),
    ],
)
def test_names_that_cannot_be_files(name: str, message: str) -> None:
    """One line that says what to write, without the password."""
    with pytest.raises(FileError, match=message) as caught:
        Location(name).size()
    assert "secret" not in str(caught.value) and caught.value.exit_code == 2


def test_what_is_missing(bucket: str) -> None:
    """A file that is not there, and a bucket that is not there, are told apart."""
    for act in (Location.open, Location.size, Location.version):
        with pytest.raises(FileNotFoundError, match="no such file: s3://files/none"):
            act(Location(f"{bucket}/none"))
        with pytest.raises(FileError, match=r"no bucket 'elsewhere' on http://127.0.0.1:.*: create it"):
            act(Location("s3://elsewhere/none"))
    with pytest.raises(FileError, match="no bucket 'elsewhere'"):
        Location("s3://elsewhere/none").write(b"")


def test_credentials_and_permissions(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    """No credentials, wrong ones, and ones without permission: one line each, which says what to do."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with serving(auth_after=3) as server:
        server.bucket("closed")
        server.client("iam").create_user(UserName="nobody")
        key = server.client("iam").create_access_key(UserName="nobody")["AccessKey"]

        def said(number: int, **variables: str) -> str:
            # Each has an address of its own: pyarrow reads credentials when a file system is made, and it is kept.
            place = f"s3://closed/x?endpoint_override=127.0.0.1:{server.port}&scheme=http&region=us-east-{number}"
            with monkeypatch.context() as patch:
                for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                    patch.delenv(name, raising=False)
                for name, value in variables.items():
                    patch.setenv(name, value)
                with pytest.raises(FileError) as caught:
                    Location(place).size()
            assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
            return str(caught.value)

        assert "no credentials for 127.0.0.1:" in (line := said(1)) and "set AWS_ACCESS_KEY_ID" in line
        mine = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
        assert "no permission" in said(2, **mine)


def test_wrong_keys_are_named() -> None:
    """What the server says about a key is passed on, without numbers of requests."""
    from nestpipe.files.errors import explain

    error = OSError(
        "When x: AWS Error INVALID_ACCESS_KEY_ID during ListObjectsV2 operation: No such key. (Request ID: 7)"
    )
    assert str(explain(Url.parse("gs://a/b"), error)) == (
        "gs://a/b: Google Cloud Storage does not accept the credentials (No such key): check them"
    )


@pytest.mark.slow
def test_a_connection_that_comes_back(storage: Server) -> None:
    """A server that is away for a moment costs a moment."""
    import threading

    with serving() as server:
        server.bucket("back")
        place = Location(f"s3://back/f?endpoint_override=127.0.0.1:{server.port}&scheme=http")
        place.write(b"12345")
        with place.open() as file:
            server.freeze()
            timer = threading.Timer(2.0, server.thaw)
            timer.start()
            assert file.read() == b"12345"
            timer.join()


@pytest.mark.slow
def test_an_upload_goes_on_when_the_connection_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that a server did not take are sent again."""
    import threading

    monkeypatch.setattr(systems, "REQUEST_SECONDS", 1.0)
    data = os.urandom(25_000_000)
    with serving() as server:
        server.bucket("back")
        place = Location(f"s3://back/f?endpoint_override=127.0.0.1:{server.port}&scheme=http&region=us-west-1")
        with place.upload() as upload:
            upload.write(data[:12_000_000])
            server.freeze()
            timer = threading.Timer(6.0, server.thaw)
            timer.start()
            upload.write(data[12_000_000:])
            timer.join()
        assert place.read() == data


@pytest.mark.slow
def test_a_server_that_is_lost(impatient: None) -> None:
    """Whether it refuses connections or never answers: one line, at the deadline, which names file and server."""
    with serving() as server:
        server.bucket("lost")
        place = Location(f"s3://lost/f?endpoint_override=127.0.0.1:{server.port}&scheme=http")
        place.write(b"12345")
        with place.open() as file:
            server.freeze()
            line = (
                r"^s3://lost/f\?.*: 127.0.0.1:\d+ did not answer within 1 s \(no answer\): check that the server runs"
            )
            with pytest.raises(Unreachable, match=line):
                file.read()
            assert waiting.left_behind()
            server.thaw()
        server.stop()
        with pytest.raises(Unreachable, match=r"s3://lost/f.*did not answer within 1 s \("):
            place.size()
        with pytest.raises(Unreachable):
            place.write(b"")
