"""Reading and writing in folders whose owner is not to be trusted."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from hpcpace.core.files import Folder, read_file, target_folder, write_file

SECRET = b"a secret of root's"


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def _fifo(path, _):
    os.mkfifo(path)


def _socket(path, _):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path, secret: path.symlink_to(secret), "symbolic link"),
        (lambda path, secret: path.symlink_to(path), "symbolic link"),
        (lambda path, secret: path.mkdir(), "no regular file"),
        (_fifo, "no regular file"),
        (_socket, "no regular file"),
        (lambda path, secret: None, "No such file"),
    ],
)
def test_reads_regular_files_only(run, secret, make, reason):
    make(run / "name", secret)
    with Folder.open(run) as folder, pytest.raises(OSError, match=reason):
        folder.read("name", most_bytes=100)


def test_a_tree_is_removed_and_nothing_that_its_links_lead_to(run, secret):
    tree = run / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file").write_text("content")
    (tree / "to-file").symlink_to(secret)
    (tree / "a" / "to-folder").symlink_to(secret.parent)
    os.mkfifo(tree / "a" / "b" / "fifo")
    with Folder.open(run) as folder:
        folder.remove_tree("tree")
    assert list(run.iterdir()) == [] and secret.read_bytes() == SECRET


@pytest.mark.parametrize("make", [_fifo, _socket, lambda path, secret: path.symlink_to(secret.parent)])
def test_what_is_no_folder_is_no_tree_and_not_opened(run, secret, make):
    make(run / "tree", secret)
    with Folder.open(run) as folder, pytest.raises(OSError, match="it is no folder"):
        folder.remove_tree("tree")
    assert [path.name for path in run.iterdir()] == ["tree"]


def test_a_tree_that_is_too_deep_is_an_error(run):
    (run / "tree").joinpath(*["a"] * 40).mkdir(parents=True)
    with Folder.open(run) as folder, pytest.raises(OSError, match="too deep"):
        folder.remove_tree("tree")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../secret", "/etc/passwd", "a\0b"])
def test_refuses_what_is_no_name(run, name):
    with Folder.open(run) as folder:
        for use in (folder.folder, folder.open_file, lambda name: folder.write(name, b"")):
            with pytest.raises(OSError, match="not the name of a file"):
                use(name)


def test_reads_no_more_than_allowed(run):
    write_file(run / "name", b"12345")
    assert read_file(run / "name", most_bytes=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_file(run / "name", most_bytes=4)


def test_a_sparse_file_is_refused_before_it_is_read(run):
    with open(run / "name", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than"):
        read_file(run / "name", most_bytes=1 << 20)


def test_a_folder_that_is_a_link_is_not_entered(run, tmp_path):
    (run / "trace").symlink_to(tmp_path)
    with Folder.open(run) as folder:
        assert not folder.has_folder("trace")
        with pytest.raises(OSError, match="link"):
            folder.folder("trace")


def test_stays_in_the_folder_that_was_opened(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    with Folder.open(run) as folder:
        run.rename(tmp_path / "moved")
        run.symlink_to(other)
        folder.write("name", b"x")
    assert not list(other.iterdir())
    assert (tmp_path / "moved" / "name").read_bytes() == b"x"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o000])
def test_the_umask_decides_the_mode(run, mask):
    before = os.umask(mask)
    try:
        write_file(run / "name", b"x")
    finally:
        os.umask(before)
    assert (run / "name").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_link_in_the_way_is_replaced_and_not_followed(run, secret):
    (run / "name").symlink_to(secret)
    write_file(run / "name", b"x")
    assert not (run / "name").is_symlink()
    assert secret.read_bytes() == SECRET
    assert secret.stat().st_mode & 0o777 == 0o600


def test_a_swapper_in_the_folder_gets_nothing(run, secret):
    """Exchange every file that appears for links to a secret, as fast as it goes, while a file is written."""
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            for name in os.listdir(run):
                try:
                    os.unlink(run / name)
                    os.symlink(secret, run / name)
                except OSError:
                    continue

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(200):
            try:
                write_file(run / "name", f"{number}")
            except OSError:
                continue
    finally:
        ended.set()
        thread.join()
    assert secret.read_bytes() == SECRET
    assert secret.stat().st_mode & 0o777 == 0o600


def test_a_failed_write_leaves_what_was_there(run):
    write_file(run / "name", b"old")
    with pytest.raises(TypeError):
        write_file(run / "name", 5)
    assert [path.name for path in run.iterdir()] == ["name"]
    assert (run / "name").read_bytes() == b"old"


def test_closes_what_it_holds(run):
    with Folder.open(run) as folder:
        descriptor = folder.descriptor
        os.fstat(descriptor)
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o000])
def test_a_mode_that_is_asked_for_is_the_most_that_a_file_gets(run, mask):
    before = os.umask(mask)
    try:
        with Folder.open(run) as folder:
            folder.write("written", b"x", mode=0o644)
            os.close(folder.create_file("created", mode=0o644))
            folder.make_folder("made", mode=0o755).close()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in run.iterdir()}
    assert modes == {"written": 0o644, "created": 0o644, "made": 0o755}


def test_a_new_file_takes_the_place_of_nothing(run, secret):
    (run / "link").symlink_to(secret)
    (run / "dangling").symlink_to(run / "nowhere")
    (run / "file").touch()
    with Folder.open(run) as folder:
        for name in ("link", "dangling", "file"):
            with pytest.raises(OSError, match="File exists"):
                folder.create_file(name)
    assert secret.read_bytes() == SECRET
    assert not (run / "nowhere").exists()


def test_a_folder_that_is_there_is_opened_and_not_made_anew(run, secret):
    (run / "there").mkdir()
    (run / "there" / "file").touch()
    (run / "link").symlink_to(run / "there")
    with Folder.open(run) as folder:
        assert folder.make_folder("there").names() == ["file"]
        for name in ("link", "there/inner", ".."):
            with pytest.raises(OSError, match=r"link|not the name of a file"):
                folder.make_folder(name)


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_a_user_names_does_not_take_the_place_of_a_pipe(tmp_path, is_link):
    pipe, target = tmp_path / "pipe", tmp_path / "link" if is_link else tmp_path / "pipe"
    os.mkfifo(pipe)
    if is_link:
        target.symlink_to(pipe)
    before = target.lstat()
    with pytest.raises(OSError, match="not replaced by a file"):
        write_file(target, "text")
    with pytest.raises(OSError, match="not replaced by a file"):
        target_folder(target)
    assert target.lstat().st_ino == before.st_ino
