"""The public names of `nestpipe`: what users import.  Adding or removing one is a decision, and is made here."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import nestpipe
from nestpipe.version import VERSION

PUBLIC = [
    "SGD",
    "Adagrad",
    "Adam",
    "Batch",
    "DeferredLinear",
    "DeferredStack",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "EvictionPolicy",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "NestPipeError",
    "PipelineConfig",
    "Progress",
    "RowWiseAdagrad",
    "Source",
    "TableDefaults",
    "TrainPipeline",
    "World",
    "__version__",
]
FORMER = {"LateLinear": "DeferredLinear", "LateStack": "DeferredStack", "TableLife": "EvictionPolicy"}
"""Old names that stay importable but are in no list, with the names that replace them."""


def test_public_names_are_pinned() -> None:
    """`__all__` is exactly this list; what is importable besides are former names."""
    assert sorted(nestpipe.__all__) == sorted(PUBLIC)
    assert nestpipe.FORMER == FORMER
    assert {*nestpipe._HOME} <= {*PUBLIC}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported(name: str) -> None:
    found = getattr(nestpipe, name)
    assert isinstance(found, str) or found.__name__ == name


def test_former_names_mean_the_new_ones() -> None:
    for former, name in FORMER.items():
        assert getattr(nestpipe, former) is getattr(nestpipe, name), former


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nestpipe' has no attribute 'TrainPipelines'"):
        _ = nestpipe.TrainPipelines  # type: ignore[attr-defined]


def test_one_version() -> None:
    """The installed package, the library and version.py agree, and type checkers find the package's types."""
    assert version("nestpipe") == nestpipe.__version__ == VERSION
    assert (Path(nestpipe.__file__).parent / "py.typed").is_file()


def test_importing_the_library_is_light_and_silent() -> None:
    """`import nestpipe` loads neither torch nor numba, and its warnings reach nobody who did not ask for them."""
    program = (
        "import logging, sys, nestpipe\n"
        "assert not {'torch', 'numba', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
        "logging.getLogger('nestpipe.checkpoint').warning('not shown')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
