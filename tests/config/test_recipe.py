from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.config.build import RecipeError, build
from nestpipe.config.describe import describe
from nestpipe.config.pipeline import SCHEDULES
from nestpipe.config.recipe import SECTIONS, Recipe, load_recipe
from nestpipe.config.wording import field_help


@dataclass(frozen=True)
class Files:
    path: str
    """Where the files are."""
    ids: int = 100
    hash: bool = False


@dataclass(frozen=True)
class Tower:
    dim: int
    """Width."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ValueError(f"the tower's dim must be at least 1,\nnot {self.dim}")


@dataclass(frozen=True)
class Wild:
    """Every type that a recipe knows."""

    dim: int = 8
    """Embedding width."""
    scale: float = 1.0
    name: str = ""
    flag: bool | None = True
    layers: list[int] = field(default_factory=list)
    micro: int | Literal["auto"] = "auto"
    sizes: int | list[int] = 1
    mode: Literal["sum", "mean"] = "sum"
    share: float | None = 0.5
    dims: dict[str, int] = field(default_factory=dict)
    pair: tuple[float, float] = (0.0, 1.0)
    many: tuple[str, ...] = ()
    tower: Tower = field(default_factory=lambda: Tower(4))
    towers: list[Tower] = field(default_factory=list)
    spare: Tower | None = None
    derived: int = field(init=False, default=3)


DATA, MODEL = {"files": Files, "files2": Files}, {"wild": Wild}
TEXT = '[data]\nkind = "files"\npath = "x"\n[model]\nkind = "wild"\n'


def load(text: str, *overrides: str, directory: Path) -> Recipe:
    file = directory / "some.toml"
    file.write_text(text, encoding="utf-8", newline="")
    return load_recipe(file, overrides, DATA, MODEL)


def message(tmp_path: Path, *overrides: str, text: str = TEXT) -> str:
    with pytest.raises(RecipeError) as caught:
        load(text, *overrides, directory=tmp_path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_small_recipe_gets_defaults_and_its_name(tmp_path: Path) -> None:
    """Promise: only data and model must be given; the rest has defaults and the name is the file's."""
    recipe = load(TEXT, directory=tmp_path)
    assert (recipe.name, recipe.data, recipe.model) == ("some", Files("x"), Wild())
    assert recipe.tables.optimizer == "rowwise_adagrad" and recipe.train.batch_size == 1024
    assert (recipe.train.steps, recipe.train.epochs, recipe.eval.top_k) == (None, None, (10, 50, 200))


def test_overrides_are_toml_or_bare_strings(tmp_path: Path) -> None:
    """Promise: --set takes any TOML value, a bare string, none for an optional key, and the last one wins."""
    recipe = load(
        TEXT,
        *(
            "model.dim=16",
            "model.dim = 64",
            "data.path=/a/b=c d",
            "data.hash=true",
            "tables.lr=1",
            "model.layers=[1,2]",
        ),
        *("model.dims.item=4", "model.tower.dim=9", "train.epochs=none", "train.steps=5", "model.many=['2024-01-01']"),
        directory=tmp_path,
    )
    assert recipe.data == Files("/a/b=c d", hash=True)
    assert recipe.model == Wild(dim=64, layers=[1, 2], dims={"item": 4}, tower=Tower(9), many=("2024-01-01",))
    assert recipe.tables.lr == 1.0 and type(recipe.tables.lr) is float
    assert (recipe.train.steps, recipe.train.epochs) == (5, None)
    for text in ("2024-01-01", "07:30:00", "1\nids=2", "'", ""):
        assert load(TEXT, f"data.path={text}", directory=tmp_path).data.path == text


@pytest.mark.parametrize(
    "override, said",
    [
        ("modle.dim=64", "unknown key 'modle.dim': did you mean 'model.dim'?"),
        ("model.dmi=64", "unknown key 'model.dmi': did you mean 'model.dim'?"),
        ("data.zzz=1", "unknown key 'data.zzz': data has path, ids, hash"),
        ("model.derived=1", "unknown key 'model.derived': model has dim, scale"),
        ("model.tower.dmi=1", "unknown key 'model.tower.dmi': did you mean 'model.tower.dim'?"),
        ("lr=1", "unknown key 'lr': did you mean 'tables.lr' or 'dense.lr'?"),
        ("trian=1", "unknown key 'trian': did you mean 'train'?"),
        ("xyz.a=1", "unknown section 'xyz': the sections are data, model, tables"),
        ("data.kind=file", "unknown data.kind 'file': did you mean 'files'?"),
        ("data.kind=[1]", "unknown data.kind [1]: the kinds are files, files2"),
        ("model.kind=gpt", "unknown model.kind 'gpt': the kinds are wild"),
        ("data.ids=abc", "data.ids must be a whole number, not 'abc'"),
        ("data.ids=1.0", "data.ids must be a whole number, not 1.0"),
        ("data.ids=true", "data.ids must be a whole number, not true"),
        ("data.hash=1", "data.hash must be true or false, not 1"),
        ("data.path=5", "data.path must be a string, not 5"),
        ("data.ids=none", "data.ids must be a whole number, not 'none'"),
        ("data.ids.x=1", "data.ids must be a whole number, not {'x': 1}"),
        ("tables.lr=nan", "tables.lr must be a number, not nan"),
        ("train.steps=x", "train.steps must be a whole number or none, not 'x'"),
        ("train=5", "train must be a table, not 5"),
        ("data=5", "data must be a table, not 5"),
        ("model.tower=5", "model.tower must be a table, not 5"),
        ("model.sizes=[1, 'a']", "model.sizes[1] must be a whole number, not 'a'"),
        ("model.sizes=a", "model.sizes must be a whole number or a list of whole numbers, not 'a'"),
        ("model.micro=atuo", "model.micro must be a whole number or 'auto', not 'atuo'"),
        ("model.pair=[1]", "model.pair must be a list of 2 numbers, not [1]"),
        ("model.dims={a=''}", "model.dims.a must be a whole number, not ''"),
        ("model.towers=[{dim=1}, {}]", "model.towers[1].dim is missing: it must be a whole number"),
        ("model.spare={dim='x'}", "model.spare.dim must be a whole number, not 'x'"),
        ("model.tower.dim=0", "the tower's dim must be at least 1, not 0"),
        ("tables.optimizer=adagard", "not 'adagard'; did you mean 'adagrad'?"),
        ("train.batch_size=0", "train.batch_size must be at least 1, not 0"),
        ("pipeline.micro_batches=0", "pipeline.micro_batches must be from 1 to 32767"),
        ("tables.lr=-1", "tables.lr must be above 0 and finite, not -1.0"),
        ("tables.decay=cosine", "tables.decay_steps must be at least 1 with decay 'cosine', not 0"),
        ("dense.betas=[0.9, 1]", "dense.betas must be from 0 to below 1, not [0.9, 1.0]"),
        ("dense.momentum=0.9", "dense.momentum needs dense.optimizer = 'sgd', not 'adam'"),
        ("eval.top_k=[]", "eval.top_k must be different whole numbers from 1 up, not []"),
        ("train.steps", "an override must be section.key=value, not 'train.steps'"),
        ("train..steps=1", "an override must be section.key=value"),
        ("data.path.x=1", "unknown key 'data.path.x': data.path is 'x', not a table"),
    ],
)
def test_every_mistake_is_one_line_that_names_the_key(tmp_path: Path, override: str, said: str) -> None:
    """Promise: a wrong key, kind, type or range is answered with the key and, if one is near, the right spelling."""
    assert said in message(tmp_path, override)


def test_missing_things_are_named(tmp_path: Path) -> None:
    """Promise: a required key or kind that is not there is named."""
    no_path = TEXT.replace('path = "x"\n', "")
    assert message(tmp_path, text=no_path) == "data.path is missing: it must be a string"
    assert message(tmp_path, text="") == "data.kind is missing: the kinds are files, files2"


def test_files_that_are_not_recipes(tmp_path: Path) -> None:
    """Promise: a missing file lists the shipped recipes, those are found by name, broken TOML gets file and line."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "clicks.toml").write_text(TEXT)
    for name in ("clicks", "clicks.toml"):
        assert load_recipe(name, [], DATA, MODEL, shipped).name == "clicks"
    for name in ("clocks", "no/clicks.toml"):
        with pytest.raises(RecipeError, match=rf"^no recipe '{name}' here; the shipped ones are clicks$"):
            load_recipe(name, [], DATA, MODEL, shipped)
    assert "some.toml' is not valid TOML: Invalid value (at line 2, column 5)" in message(
        tmp_path, text="a = 1\nb = \n"
    )
    assert "at line 2, the end of the file" in message(tmp_path, text="a = 1\nb = [")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(RecipeError, match="not text in UTF-8"):
        load_recipe(tmp_path / "latin.toml", [], DATA, MODEL)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
whole = st.integers(-(2**63), 2**63 - 1)
number = st.floats(allow_nan=False)
towers = st.builds(Tower, st.integers(1), number)
wilds = st.builds(
    Wild,
    dim=whole,
    scale=number,
    name=text,
    flag=st.none() | st.booleans(),
    layers=st.lists(whole, max_size=3),
    micro=whole | st.just("auto"),
    sizes=whole | st.lists(whole, max_size=3),
    mode=st.sampled_from(["sum", "mean"]),
    share=st.none() | number,
    dims=st.dictionaries(text, whole, max_size=3),
    pair=st.tuples(number, number),
    many=st.lists(text, max_size=3).map(tuple),
    tower=towers,
    towers=st.lists(towers, max_size=2),
    spare=st.none() | towers,
)
steps = st.none() | st.integers(1)
positive = st.floats(1e-9, 1e9)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    recipe = Recipe(draw(text), draw(st.sampled_from(list(DATA))), Files(draw(text), draw(whole)), "wild", draw(wilds))
    optimizer = {
        "lr": draw(positive),
        "eps": draw(st.none() | positive),
        "betas": draw(st.tuples(st.just(0.0), st.floats(0, 0.999))),
        "warmup_steps": draw(st.integers(0)),
        "decay": draw(st.sampled_from(["none", "linear", "cosine", "inverse_sqrt"])),
        "decay_steps": draw(st.integers(1)),
        "decay_to": draw(st.floats(0, 1)),
    }
    return replace(
        recipe,
        tables=replace(recipe.tables, **optimizer, init="normal"),
        dense=replace(recipe.dense, **optimizer, optimizer="sgd", momentum=draw(st.floats(0, 0.99))),
        pipeline=replace(recipe.pipeline, schedule=draw(st.sampled_from(SCHEDULES))),
        train=replace(recipe.train, steps=7, epochs=draw(steps), clip_norm=draw(st.none() | positive)),
        eval=replace(
            recipe.eval, every=draw(steps), top_k=tuple(draw(st.sets(st.integers(1), min_size=1, max_size=3)))
        ),
    )


@settings(max_examples=50, deadline=None)
@given(recipes())
def test_a_recipe_written_and_read_is_the_same(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    """Promise: recipe.toml in a run directory repeats the run, whatever is in the recipe."""
    assert load(recipe.to_toml(), directory=tmp_path_factory.getbasetemp()) == recipe


def test_every_key_has_help_and_a_default_that_loads(tmp_path: Path) -> None:
    """Promise: --help-recipe lists every key with its type, default and help, also those of data and model kinds."""
    keys = {(key.key, key.kind): key for key in describe(DATA, MODEL)}
    for section, cls in SECTIONS.items():
        assert set(field_help(cls)) == {f.name for f in fields(cls)}
        assert all(keys[f"{section}.{f.name}", None].help for f in fields(cls))
    path = keys["data.path", "files2"]
    assert (path.type, path.default, path.help) == ("a string", "required", "Where the files are.")
    epochs = keys["train.epochs", None]
    assert (epochs.type, epochs.default) == ("a whole number or none", "none")
    assert keys["model.tower.dim", "wild"].help == "Width."
    assert keys["data.kind", None].type == "one of 'files', 'files2'"
    shown = [f"{key}={k.default}" for (key, kind), k in keys.items() if kind is None and k.default != "required"]
    recipe = load(TEXT, *(o for o in shown if not o.startswith("name")), directory=tmp_path)
    assert recipe == load(TEXT, directory=tmp_path)


def test_a_type_that_recipes_do_not_know_is_a_programming_error() -> None:
    """Promise: a dataclass with a field that TOML cannot fill is called so, not blamed on the user's recipe."""
    with pytest.raises(TypeError, match="cannot have the type"):
        build(Odd, {"thing": 1}, "model")


@dataclass(frozen=True)
class Odd:
    thing: set[int] | Any


def test_every_shipped_key_has_help() -> None:
    """Promise: `nestpipe recipe` explains every key, also those of the built-in data and models."""
    from nestpipe.data.kinds import KINDS as DATA_KINDS
    from nestpipe.models.kinds import KINDS as MODEL_KINDS

    assert not [key.key for key in describe(DATA_KINDS, MODEL_KINDS) if not key.help]
