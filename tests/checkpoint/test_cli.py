"""`nestpipe checkpoint`: lists, inspects, verifies and exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from commands import nestpipe, refused
from made import CHANGED, FULL, make, manifest_of, reseal
from nestpipe.checkpoint import export as exporting
from nestpipe.checkpoint import vector_files
from nestpipe.checkpoint.export import export_table
from nestpipe.checkpoint.folder import Folder
from nestpipe.checkpoint.vector_files import read_vectors
from nestpipe.cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with two checkpoints."""
    make(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "recipe.toml").write_text('name = "made"\n')
    return tmp_path / "run"


def test_ls_lists_checkpoints_and_strays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shows steps, kinds, sizes and metrics, marks best and last, and names leftovers and uncommitted directories."""
    folder = run / "checkpoints"
    (folder / ".writing-step-00000015").mkdir()
    (folder / "step-00000012").mkdir()
    shutil.copytree(folder / "step-00000005", folder / "step-00000007")
    assert main(["checkpoint", "ls", str(run), "--json", str(run / "ls.json")]) == 0
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines()[1:]}
    assert "full" in lines["5"] and "incremental on step-00000005" in lines["10"] and "best auc, last" in lines["10"]
    assert "half written" in lines[".writing-step-00000015:"] and "not committed" in lines["step-00000012:"]
    assert "is the checkpoint of step 5" in lines["step-00000007:"]
    found = json.loads((run / "ls.json").read_text())
    assert [(one["step"], one["full"], one["marks"]) for one in found["checkpoints"]] == [
        (FULL, True, []),
        (CHANGED, False, ["best", "last"]),
    ]
    assert len(found["strays"]) == 3
    assert main(["checkpoint", "ls", str(folder), "--best", "ne", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][1]["marks"] == ["best", "last"]


def test_inspect_shows_tables_files_and_position(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the last checkpoint, of a step, or of a directory: tables, files and data position."""
    assert main(["checkpoint", "inspect", str(run)]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("item, shop", "Adagrad", "float32", "dense.safetensors", "made", "unit 10"))
    for arguments in ([str(run), "--step", "5"], [str(run / "checkpoints" / "step-00000005")]):
        assert main(["checkpoint", "inspect", *arguments, "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["step"] == FULL and found["base"] == [] and found["recipe"] == "made"
        assert [group["tables"] for group in found["groups"]] == [["item", "shop"], ["user"]]


def test_text_of_a_checkpoint_is_never_markup(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table name that looks like rich markup is printed literally."""
    directory = run / "checkpoints" / "step-00000005"
    manifest = manifest_of(directory)
    manifest["groups"][0]["tables"][0] = "[red]x[/nothing]"
    reseal(directory, json.dumps(manifest).encode())
    assert main(["checkpoint", "inspect", str(directory)]) == 0
    assert "[red]x[/nothing]" in capsys.readouterr().out


@pytest.mark.slow
def test_verify_reads_the_chain_and_names_a_damaged_file(run: Path, tmp_path: Path) -> None:
    """Exit 0 for an intact chain; 1 and one line with the file's name for a flipped bit anywhere in it."""
    ended = nestpipe(tmp_path, "checkpoint", "verify", str(run), "--all")
    assert (ended.code, ended.err) == (0, "") and "step 10 is intact" in ended.out and "step 5" not in ended.out
    for name in ("worker1-group1-rows.safetensors", "dense.safetensors", "worker0.safetensors"):
        path = run / "checkpoints" / "step-00000005" / name
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        ended = nestpipe(tmp_path, "checkpoint", "verify", str(run))
        assert ended.code == 1
        refused(ended, str(path), "SHA-256")
        path.write_bytes(good)


@pytest.mark.parametrize("what", ["owner", "rows"])
def test_verify_finds_what_a_digest_cannot(run: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Files under the wrong worker, and a manifest with a wrong row count, with correct digests."""
    directory = run / "checkpoints" / "step-00000010"
    manifest = manifest_of(directory)
    if what == "owner":
        for file in manifest["files"]:
            if file["kind"] in ("rows", "removed"):
                file["worker"] = 1 - file["worker"]
    else:
        manifest["groups"][1]["rows"] += 1
    reseal(directory, json.dumps(manifest).encode())
    assert main(["checkpoint", "verify", str(run), "--step", "10"]) == 1
    assert {"owner": "does not own", "rows": "rows in its files"}[what] in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(run), "--step", "5"]) == 0


@pytest.mark.parametrize("name", ["item.parquet", "item.npz", "item.npy"])
@pytest.mark.parametrize("portion", [1 << 26, 100])
def test_export_has_the_rows_of_the_whole_chain(
    tmp_path: Path, name: str, portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later rows win and removed keys are gone, bit for bit, in row groups of any size; reading gives the same rows."""
    monkeypatch.setattr(vector_files, "GROUP_BYTES", portion)
    tables = make(tmp_path / "made")
    folder = Folder(tmp_path / "made")
    last = folder.find()
    assert last is not None
    for table in tables:
        path = tmp_path / name.replace("item", table)
        made = export_table(folder.chain(last), table, path, state=True)
        assert made.rows == len(tables[table])
        dim = made.dim
        parts = list(read_vectors(path, dim, np.dtype(np.float32)))
        found = {k: v.tobytes() for keys, vectors in parts for k, v in zip(keys.tolist(), vectors)}
        assert found == {key: values.tobytes() for key, (values, _) in tables[table].items()}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    keys, state = _keys_and_state(tmp_path / name)
    assert {k: s.tobytes() for k, s in zip(keys.tolist(), state)} == {
        key: state.tobytes() for key, (_, state) in tables["item"].items()
    }


def _keys_and_state(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads them as another program would."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        assert [str(t) for t in table.schema.types[1:]] == ["fixed_size_list<element: float not null>[4]"] * 2
        return table["key"].to_numpy(), np.array(table["state"].to_pylist(), np.float32)
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return arrays["keys"], arrays["state"]
    return np.load(path.with_suffix(".keys.npy")), np.load(path.with_suffix(".state.npy"))


def test_export_overwrites_nothing_and_leaves_no_partial_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --force an existing file stays.  A damaged checkpoint leaves no file."""
    to = run / "item.parquet"
    to.write_text("mine")
    command = ["checkpoint", "export", str(run), "--table", "item", "--to", str(to)]
    assert main(command) == 2 and to.read_text() == "mine"
    assert main([*command, "--force"]) == 0 and to.stat().st_size > 100
    path = run / "checkpoints" / "step-00000005" / "worker1-group0-rows.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    for name in ("a.parquet", "a.npz", "a.npy"):
        assert main([*command[:-1], str(run / name)]) == 2
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "item.parquet", "recipe.toml"]
    assert exporting.files_of(run / "a.npy", True)["state"].name == "a.state.npy"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "nowhere"], ["no directory 'nowhere'"]),
        (["ls", "."], ["no checkpoint in"]),
        (["inspect", "run", "--step", "6"], ["no checkpoint of step 6", "5, 10"]),
        (["verify", "run", "--step", "6"], ["no checkpoint of step 6", "5, 10"]),
        (["verify", "run", "--step", "5", "--all"], ["--all", "--step"]),
        (["export", "run", "--table", "itme", "--to", "x.npz"], ["no table 'itme'", "item, shop, user"]),
        (["export", "run", "--table", "item", "--to", "x.csv"], ["x.csv", ".parquet"]),
        (["export", "run", "--table", "item", "--to", "no/x.npz"], ["no folder 'no'"]),
        (["ls", "run", "--json", "no/x.json"], ["--json", "no folder 'no'"]),
    ],
)
def test_mistakes_are_one_line(
    run: Path,
    arguments: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mistake gives exit code 2 and one line that says what to change."""
    monkeypatch.chdir(run.parent)
    assert main(["checkpoint", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and all(word in said.err for word in words), said.err
