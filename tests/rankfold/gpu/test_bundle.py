"""The bundle for a bare GPU machine: what of vLLM is taken, and that it is there once unpacked."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def bundle() -> ModuleType:
    """scripts/gpu_bundle.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("gpu_bundle", ROOT / "scripts/gpu_bundle.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_python_files_are_taken_and_compiled_ones_are_not(
    bundle: ModuleType, tmp_path: Path
) -> None:
    package = tmp_path / "vllm"
    for name in ("__init__.py", "_C.abi3.so", "a/config.json", "a/kernel.cubin"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    told = tmp_path / "vllm-0.33.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("")
    taken = {path.relative_to(tmp_path).as_posix() for path in bundle._files(package)}
    assert taken == {"vllm/__init__.py", "vllm/a/config.json", "vllm-0.33.0.dist-info/METADATA"}


def test_archive_and_wheels_are_unpacked_side_by_side(
    bundle: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for archive, name in (("vllm.zip", "vllm/__init__.py"), ("a-1-py3-none-any.whl", "a.py")):
        with zipfile.ZipFile(tmp_path / archive, "w") as packed:
            packed.writestr(name, "x = 1\n")
    site = tmp_path / "site"
    assert bundle.main(["unpack", str(tmp_path), str(site)]) == 0
    assert (site / "vllm/__init__.py").exists()
    assert (site / "a.py").exists()
    assert f"PYTHONPATH={site}" in capsys.readouterr().out


def test_a_folder_without_the_archive_is_one_line(
    bundle: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bundle.main(["unpack", str(tmp_path), str(tmp_path / "site")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "vllm.zip" in line
