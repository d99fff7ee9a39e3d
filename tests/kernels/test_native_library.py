"""Compiling the CPU kernels: cached, and optional for serving."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberline.kernels import native_library
from emberline.models import registry


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder, and a compiler that only writes a file."""
    cc = tmp_path / "cc"
    script = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift || exit 0; done\necho compiled > "$2"\n'
    cc.write_text(f"{script}echo >> {tmp_path}/compiled\n")
    cc.chmod(0o755)
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("CC", str(cc))
    monkeypatch.setenv("EMBERLINE_KERNEL_CACHE", str(folder))
    native_library._process_folder.cache_clear()
    yield folder
    native_library._process_folder.cache_clear()


def test_compiles_once(cache: Path) -> None:
    library = native_library.library_path()
    assert native_library.library_path() == library
    assert [path.name for path in cache.iterdir()] == [library.name]
    assert (cache.parent / "compiled").read_text() == "\n", "one run of the compiler"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To another user."""
    if os.getuid() == 0:
        os.chown(path, 4242, -1)
    else:
        monkeypatch.setattr(native_library.os, "getuid", lambda: 4242)


def replace_by_link(library: Path, target: Path) -> None:
    target.write_text("planted")
    library.unlink()
    library.symlink_to(target)


@pytest.mark.parametrize("how", ["group", "others", "owner", "link"])
def test_a_library_that_another_user_may_have_written_is_compiled_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "owner" and os.getuid() != 0:
        pytest.skip("only root can give a file away")
    library = native_library.library_path()
    assert library.parent == cache
    library.write_text("planted")
    if how == "owner":
        give_away(library, monkeypatch)
    elif how == "link":
        replace_by_link(library, cache.parent / "planted.so")
    else:
        library.chmod(0o770 if how == "group" else 0o707)
    assert native_library.library_path() == library
    assert library.read_text() == "compiled\n"
    assert not library.is_symlink()
    assert library.stat().st_mode & 0o777 == 0o700
    library.write_text("kept")
    assert native_library.library_path().read_text() == "kept"


@pytest.mark.parametrize("how", ["group", "others", "owner"])
def test_in_a_folder_that_another_user_may_write_nothing_is_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    planted = cache / native_library.library_path().name
    planted.write_text("planted")
    if how == "owner":
        give_away(cache, monkeypatch)
    else:
        cache.chmod(0o770 if how == "group" else 0o707)
    library = native_library.library_path()
    assert library.parent != cache
    assert library.read_text() == "compiled\n"
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert native_library.library_path() == library, "once per process"
    assert "may be written by other users" in caplog.text
    shutil.rmtree(library.parent)


def test_a_new_cache_folder_is_private_whatever_the_umask(cache: Path) -> None:
    cache.rmdir()
    umask = os.umask(0)
    try:
        library = native_library.library_path()
    finally:
        os.umask(umask)
    assert library.parent == cache
    assert cache.stat().st_mode & 0o777 == 0o700
    assert library.stat().st_mode & 0o777 == 0o700


def test_missing_compiler_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(native_library.BuildError, match="install gcc"):
        native_library.library_path()


def test_compiler_errors_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cc = tmp_path / "cc"
    cc.write_text("#!/bin/sh\necho 'no such target' >&2\nexit 1\n")
    cc.chmod(0o755)
    monkeypatch.setenv("CC", str(cc))
    monkeypatch.setenv("EMBERLINE_KERNEL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(native_library.BuildError, match="no such target"):
        native_library.library_path()


def test_falls_back_to_pytorch_without_a_compiler(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    from emberline.weights.checkpoint import open_checkpoint

    def refuse(target: str | None = None) -> None:
        raise native_library.BuildError("no C compiler found")

    monkeypatch.setattr("emberline.kernels.cpu.native_backend.load_library", refuse)
    assert registry.select_backend(open_checkpoint(smollm2), "cpu", False, None).name == "torch"
