"""A user's own class as `model.kind`: what it may take, what its keys are, and one line for each way not to fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import own
from nestpipe.config.build import RecipeError, build
from nestpipe.config.eviction import EvictionPolicy
from nestpipe.data.clicks import ClicksData
from nestpipe.data.kinds import KINDS as DATA
from nestpipe.data.sequences import SequencesData
from nestpipe.models.dlrm import DLRM, DLRMConfig
from nestpipe.models.kinds import KINDS, MODELS, make_model
from nestpipe.tables.config import TableDefaults


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(own.write(tmp_path))
    with own.importable():
        yield tmp_path


def said(kind: str) -> str:
    with pytest.raises(RecipeError) as caught:
        KINDS.own(kind)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"model.kind {kind!r}")
    return str(caught.value)


def test_keys_are_those_of_the_config_that_the_constructor_names() -> None:
    """Promise: the annotation of `config` says which keys [model] has; a class that takes none has no keys."""
    assert [f.name for f in fields(KINDS.own("own_models:Ranker"))] == ["dim", "scale"]
    assert [f.name for f in fields(KINDS.own("own_models:Nested"))] == ["depth"]  # inside the class; others may be left
    assert not fields(KINDS.own("own_models:NoKeys"))


def test_a_class_gets_what_it_names() -> None:
    """Promise: own and built-in classes get config, features, dense_features, source and tables by name, on any data."""
    clicks, sequences = ClicksData(samples=10, features=2).open("train", 1), SequencesData(users=20).open("train", 1)
    config = build(KINDS.own("own_models:Ranker"), {"dim": 5}, "model")
    model = make_model("own_models:Ranker", config, clicks, TableDefaults(dtype="float64"))
    assert [(t.name, t.embedding_dim, t.dtype) for t in model.sparse.tables] == [
        (feature, 5, "float64") for feature in clicks.features
    ]
    config = build(KINDS.own("own_models:NextItem"), {}, "model")
    assert make_model("own_models:NextItem", config, sequences, TableDefaults()).items == len(sequences.catalogue)
    assert isinstance(make_model("dlrm", DLRMConfig(), clicks, TableDefaults()), DLRM)
    assert set(KINDS) == set(MODELS)
    with pytest.raises(ValueError, match=r"sequences need model\.kind 'hstu', .*or a class of your own"):
        make_model("dlrm", DLRMConfig(), sequences, TableDefaults())


def test_settings_of_tables_that_a_class_would_ignore_are_refused() -> None:
    """Promise: [tables] never silently does nothing because a class makes its tables without `tables`."""
    clicks = ClicksData(samples=10, features=2).open("train", 1)
    config = build(KINDS.own("own_models:NoKeys"), {}, "model")
    make_model("own_models:NoKeys", config, clicks, TableDefaults())
    with pytest.raises(ValueError, match=r"does not take tables, so tables\.init would change nothing"):
        make_model("own_models:NoKeys", config, clicks, TableDefaults(init="normal"))
    with pytest.raises(ValueError, match=r"so the eviction policy in \[tables\] would change nothing"):
        make_model("own_models:NoKeys", config, clicks, TableDefaults(eviction=EvictionPolicy(admit_after=2)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("own_models:", ["must be 'module:Class', such as 'my_package.my_module:Ranker'"]),
        ("./own_models.py:Ranker", ["must be 'module:Class', such as 'own_models:Ranker'"]),
        ("own_models.py:Ranker", ["must be 'module:Class', such as 'own_models:Ranker'"]),
        ("own_model:Ranker", ["no module 'own_model'", "current directory", "Python environment", "did you mean 'own_models'?"]),
        ("own_models.deep:Ranker", ["no module 'own_models.deep'"]),
        ("own_fails:X", ["cannot be imported: ZeroDivisionError: division by zero", "own_fails.py line 2"]),
        ("own_syntax:X", ["cannot be imported: invalid syntax", "own_syntax.py line 2"]),
        ("own_lacks:X", ["cannot be imported: ModuleNotFoundError: No module named 'no_such_module'", "own_lacks.py line 1"]),
        ("own_exits:X", ["cannot be imported: SystemExit: 3", "own_exits.py line 2"]),
        ("own_models:Rankr", ["own_models.py", "has no class 'Rankr'; did you mean 'Ranker'?"]),
        ("own_models:Zzz", ["has no class 'Zzz'; its classes are RankerConfig, Ranker,"]),
        ("own_models:function", ["'function'", "is a function, not a class"]),
        ("own_models:NotAModule", ["not a torch.nn.Module"]),
        ("own_models:NeedsWidth", ["needs 'width', which a recipe does not give: it may take config, features"]),
        ("own_models:Positional", ["needs 'features'", "by name"]),
        ("own_models:NoType", ["takes config without a type"]),
        ("own_models:NoSuchType", ["type of its config cannot be read (name 'Missing' is not defined)"]),
        ("own_models:DictConfig", ["its config is the class dict, not a dataclass", "@dataclass(frozen=True)"]),
        ("own_models:MaybeConfig", ["must be a frozen dataclass"]),
        ("own_models:NotFrozen", ["its config is a dataclass that is not frozen"]),
        ("own_models:OddField", ["its config: the type of field 'things' cannot be given in TOML"]),
        ("own_models:KindField", ["has a field 'kind'", "rename it"]),
    ],
)  # fmt: skip
def test_a_class_that_does_not_fit_is_one_line(kind: str, words: list[str]) -> None:
    """Promise: every way in which a name or a class is wrong is one line that says what was looked for, and where."""
    line = said(kind)
    assert all(word in line for word in words), line


def test_the_current_directory_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a module is looked for where the command runs, and then in the environment, as `python -m` does."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own_models.py").write_text("")
    monkeypatch.syspath_prepend(str(elsewhere))
    assert KINDS.own("own_models:Ranker")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("own_data:Plain", ["is the class Plain, not a dataclass"]),
        ("own_data:NotFrozen", ["is a dataclass that is not frozen"]),
        ("own_data:NoOpen", ["has no method open"]),
        ("own_data:WrongOpen", ["open must take (self, split, seed), not (self, split)"]),
        ("own_data:Evns", ["has no class 'Evns'; did you mean 'Evens'?"]),
    ],
)
def test_data_that_does_not_fit_is_one_line(kind: str, words: list[str]) -> None:
    """Promise: the same for a class of data."""
    with pytest.raises(RecipeError) as caught:
        DATA.own(kind)
    line = str(caught.value)
    assert line.startswith(f"data.kind {kind!r}") and all(word in line for word in words), line


def test_own_data_is_a_source() -> None:
    """Promise: an own class of data is built from its keys and opened like a built-in one."""
    source = build(DATA.own("own_data:Evens"), {"ids": 7}, "data").open("train", 1)
    batch, _ = next(source.read(0, 3, 0))
    assert torch.equal(batch.labels, torch.tensor([1.0, 0.0, 1.0]))
