"""Datasets in their official formats: tiny ones made here, read as the real ones are, and refused in one line when damaged."""

import csv
import dataclasses
import fcntl
import io
import itertools
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fedbuff as fb
from fedbuff.learn import celeba, cifar, glove, leaf, sent140
from fedbuff.learn.cache import cache_folder, prepared
from fedbuff.learn.evaluate import evaluate
from fedbuff.learn.local import initial_weights
from fedbuff.learn.rows import RowClients, Scaled
from fedbuff.learn.trial import why_not

pytest.importorskip("PIL")
SGD = fb.LocalSGD(lr=0.1, batch_size=4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    for compiled in cache_folder().glob("*.so"):  # which take half a minute to compile
        (folder / compiled.name).symlink_to(compiled)
    monkeypatch.setenv("FEDBUFF_CACHE", str(folder))
    monkeypatch.delenv("FEDBUFF_DATA", raising=False)


def refusal(load: Callable[[], object]) -> str:
    """The one line that says why something can't be loaded."""
    with pytest.raises(ValueError) as caught:
        load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def loads_or_refuses(load: Callable[[], object]) -> None:
    try:
        load()
    except ValueError as e:
        assert str(e) and "\n" not in str(e)


@st.composite
def damage(draw) -> Callable[[bytes], bytes]:
    """Something that happens to files: they are cut off, bits flip, blocks go missing or are overwritten."""
    kind = draw(st.sampled_from(["cut", "flip", "overwrite", "remove"]))
    at, n = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(1, 64))
    noise = draw(st.binary(min_size=1, max_size=16))

    def apply(data: bytes) -> bytes:
        i = int(at * len(data))
        return {
            "cut": data[:i],
            "flip": data[:i] + bytes([data[i] ^ (n or 1)]) + data[i + 1 :],
            "overwrite": data[:i] + noise + data[i + len(noise) :],
            "remove": data[:i] + data[i + n :],
        }[kind]

    return apply


often = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


# ── CIFAR-10 ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def images(n: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, 10, n).tolist()


def by_python_2(data: np.ndarray, labels: list[int]) -> bytes:
    """A batch opcode by opcode as the official files have it: Python 2, protocol 2, strings of bytes."""

    def text(s: bytes) -> bytes:
        return b"U" + bytes([len(s)]) + s

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    dtype = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    raw = data.tobytes()
    state = (
        b"(K\x01M"
        + struct.pack("<H", len(data))
        + b"M\x00\x0c\x86"
        + dtype
        + b"\x89T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tb"
    )
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    pairs = text(b"batch_label") + text(b"training batch 1 of 5") + text(b"labels") + listed + text(b"data") + array + state
    return b"\x80\x02}(" + pairs + text(b"filenames") + b"](" + text(b"leptodactylus_s_000004.png") + b"eu."


def by_python_3(data: np.ndarray, labels: list[int], protocol: int = 4) -> bytes:
    return pickle.dumps({b"batch_label": b"1 of 5", b"labels": labels, b"data": data, b"filenames": []}, protocol)


def write_cifar(folder: Path, n: int = 12, write=by_python_2) -> Path:
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    for seed, name in enumerate((*cifar.TRAIN, *cifar.TEST)):
        (batches / name).write_bytes(write(*images(n, seed)))
    return batches


def pack(batches: Path) -> Path:
    path = batches.parent / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(batches, batches.name)
    return path


@pytest.mark.parametrize("write", [by_python_2, *(lambda d, y, p=p: by_python_3(d, y, p) for p in (2, 3, 4, 5))])
def test_a_batch_is_read_whoever_pickled_it(write):
    data, labels = images(7)
    x, y = cifar.read_batch(write(data, labels), "batch")
    assert np.array_equal(x, data.reshape(7, 3, 32, 32))
    assert y.tolist() == labels


def test_an_array_that_was_pickled_by_columns_is_read_too():
    data, labels = images(7)
    assert np.array_equal(cifar.read_batch(by_python_3(np.asfortranarray(data), labels, 2), "")[0].reshape(7, -1), data)


def test_the_folder_and_the_archive_give_the_same_task(tmp_path):
    batches = write_cifar(tmp_path / "a")
    packed = pack(batches)
    (tmp_path / "b").mkdir()
    packed.rename(tmp_path / "b" / packed.name)
    a, b, c = (fb.tasks.cifar10(str(folder), clients=6) for folder in (tmp_path / "a", tmp_path / "b", batches))
    for other in (b, c):
        for (x, y), (x2, y2) in zip([*a.clients, *a.splits.values()], [*other.clients, *other.splits.values()], strict=True):
            assert np.array_equal(x[:], x2[:]) and np.array_equal(y, y2)


def test_clients_hold_all_images_normalised_by_the_sets_mean_and_deviation(tmp_path):
    write_cifar(tmp_path)
    task = fb.tasks.cifar10(str(tmp_path), clients=6)
    assert [task.examples(c) for c in range(6)] == [10] * 6
    whole = np.concatenate([images(12, seed)[0] for seed in range(5)]).reshape(-1, 3, 32, 32)
    mean, std = (np.array(v)[:, None, None] for v in (cifar.MEAN, cifar.STD))
    expected = {tuple(np.round(((image / 255 - mean) / std).ravel()[:50], 3)) for image in whole}
    held = np.concatenate([x for x, _ in task.clients])
    assert {tuple(np.round(image.ravel()[:50].astype(float), 3)) for image in held} == expected
    assert task.name == "cifar10 (subset: 60 + 12 images)"
    assert sorted(np.concatenate([y for _, y in task.clients])) == sorted(np.concatenate([images(12, s)[1] for s in range(5)]))
    other = fb.tasks.cifar10(str(tmp_path), clients=6, split_seed=1)
    assert not all(np.array_equal(a[1], b[1]) for a, b in zip(task.clients, other.clients, strict=True))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_wants_to_run_something_is_refused_and_does_not_run(tmp_path):
    for protocol in range(6):
        data = pickle.dumps({b"data": Evil(tmp_path / "ran"), b"labels": [1]}, protocol)
        said = refusal(lambda data=data: cifar.read_batch(data, "data_batch_1"))
        assert "data_batch_1: not a whole pickle of CIFAR-10 (it asks for" in said and "system" in said
    assert not (tmp_path / "ran").exists()


def test_a_size_that_a_pickle_only_claims_takes_no_memory():
    claim = b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"."
    assert "not a whole pickle" in refusal(lambda: cifar.read_batch(claim, "b"))
    memo = b"\x80\x02Nr\xff\xff\xff\xff."  # a memo of four billion entries, to the unpickler in C
    assert "found a NoneType" in refusal(lambda: cifar.read_batch(memo, "b"))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not a whole pickle"),
        (b"<html>404</html>", "not a whole pickle"),
        (pickle.dumps([1, 2]), "expected a dictionary with data and labels, found a list"),
        (pickle.dumps({}), "found an empty one"),
        (pickle.dumps({"a\nb": 1}), "found a b"),
        (pickle.dumps({b"fine_labels": [1], b"data": images(1)[0]}), "found fine_labels, data"),  # CIFAR-100's
        (
            by_python_3(images(3)[0], np.array([1, 2, 3])),
            "expected data as an ndarray and labels as a list, found labels as an ndarray",
        ),
        (by_python_3([[0] * 3072], [1]), "expected data as an ndarray and labels as a list, found data as a list"),
        (by_python_3(images(3)[0], [1, 2, 10]), "expected labels from 0 to 9, found 10"),
        (by_python_3(images(3)[0], [1, 2, -1]), "expected labels from 0 to 9, found -1"),
        (by_python_3(images(3)[0], [1, 2, 3.5]), "expected labels from 0 to 9, found 3.5"),
        (by_python_3(images(3)[0], [1, 2]), "expected 2 × 3072 bytes for its 2 labels, found 3 × 3072 bytes"),
        (by_python_3(images(3)[0][:, :100], [1, 2, 3]), "found 3 × 100 bytes"),
        (by_python_3(images(0)[0], []), "found 0 × 3072 bytes"),
        (by_python_3(images(3)[0].astype(float), [1, 2, 3]), "found no array of bytes"),
        (by_python_3(images(3)[0].reshape(3, 3, 1024), [1, 2, 3]), "found no array of bytes"),
    ],
)
def test_a_wrong_batch_is_refused_by_name(tmp_path, content, complaint):
    batches = write_cifar(tmp_path)
    (batches / "data_batch_3").write_bytes(content)
    said = refusal(lambda: fb.tasks.cifar10(str(tmp_path)))
    assert "data_batch_3: " in said and complaint in said
    assert complaint in refusal(lambda: fb.tasks.cifar10(str(pack(batches).parent)))


@often
@given(damage(), st.sampled_from([by_python_2(*images(2)), by_python_3(*images(2)), by_python_3(*images(2), protocol=5)]))
def test_a_damaged_batch_is_loaded_or_refused(harm, batch):
    loads_or_refuses(lambda: cifar.read_batch(harm(batch), "batch"))


@often
@given(damage(), st.floats(0, 1))
def test_the_frame_of_a_pickle_is_loaded_or_refused_as_well(harm, _):
    """What is not pixels: damage to 6 kB of pixels proves little."""
    whole = by_python_2(*images(1))
    where = whole.index(images(1)[0].tobytes())
    head, tail = whole[:where], whole[where + 3072 :]
    loads_or_refuses(lambda: cifar.read_batch(harm(head) + bytes(3072) + tail, "batch"))
    loads_or_refuses(lambda: cifar.read_batch(head + bytes(3072) + harm(tail), "batch"))


@often
@given(damage())
def test_a_damaged_archive_is_loaded_or_refused(tmp_path_factory, harm):
    folder = tmp_path_factory.getbasetemp() / "packed"
    if not folder.exists():
        pack(write_cifar(folder, n=1))
    path = tmp_path_factory.getbasetemp() / "damaged.tar.gz"
    path.write_bytes(harm((folder / "cifar-10-python.tar.gz").read_bytes()))
    loads_or_refuses(lambda: list(cifar.read_archive(path)))


def test_what_is_wrong_with_an_archive_is_said_with_its_md5(tmp_path):
    packed = pack(write_cifar(tmp_path / "a"))
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    said = refusal(lambda: list(cifar.read_archive(packed)))
    assert "not a whole .tar.gz" in said and "c58f30108f718f92721af3b95e74349a" in said
    packed.write_bytes(whole[:-8] + bytes(8))  # gzip's own checksum
    assert "not a whole .tar.gz" in refusal(lambda: list(cifar.read_archive(packed)))
    (tmp_path / "a" / "cifar-10-batches-py" / "data_batch_4").unlink()
    assert "holds no data_batch_4; its md5 is" in refusal(
        lambda: list(cifar.read_archive(pack(tmp_path / "a" / "cifar-10-batches-py")))
    )


def test_a_missing_batch_is_named_with_where_to_get_it_and_what_was_found(tmp_path):
    batches = write_cifar(tmp_path)
    (batches / "data_batch_5").unlink()
    said = refusal(lambda: fb.tasks.cifar10(str(tmp_path)))
    assert "data_batch_5 is missing; get it from https://www.cs.toronto.edu/~kriz/cifar.html" in said
    assert "holds data_batch_1, data_batch_2, data_batch_3, data_batch_4, test_batch" in said


@pytest.mark.parametrize("absent", ["data_batch_1", "data_batch_4", "test_batch"])
def test_the_archive_is_used_where_the_folder_is_not_whole(tmp_path, absent):
    batches = write_cifar(tmp_path)
    packed = pack(batches)
    (batches / absent).unlink()
    assert cifar.find(tmp_path) == [packed]
    packed.unlink()
    assert f"{absent} is missing" in refusal(lambda: cifar.find(tmp_path))


def test_as_many_images_as_cifar10_has_must_be_its_own():
    """A batch that is there twice, or was overwritten, has the right shape."""
    count, means, _ = cifar._WHOLE["test"]
    x, y = np.zeros((count, 3, 32, 32), np.uint8), np.arange(count) % 10
    said = refusal(lambda: cifar.check_whole("test", x, y, "here"))
    assert said.startswith("here: its 10,000 test images are not CIFAR-10's: their channels' means are 0.000000, 0.000000")
    for channel, mean in enumerate(means):  # 255 as often as the mean wants it
        x[:, channel] = 255 * (np.arange(count * 1024) < mean * count * 1024).reshape(count, 32, 32)
    said = refusal(lambda: cifar.check_whole("test", x, y, "here"))
    assert said.startswith("here: some of its 10,000 test images or labels are not as CIFAR-10 has them; get it again")
    assert "1,000 of each class are, found 1001, 999, 1000" in refusal(
        lambda: cifar.check_whole("test", x, relabelled(y), "here")
    )
    cifar.check_whole("test", x[1:], y[1:], "here")


@given(st.integers(0, 19), st.integers(0, 3071), st.integers(1, 255), st.permutations(range(20)))
def test_a_fingerprint_is_of_images_and_their_labels_in_any_order(image, pixel, change, order):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 3, 32, 32), np.uint8), np.arange(20) % 10
    whole = cifar.fingerprint(x, y)
    assert cifar.fingerprint(x[order], y[order]) == whole
    assert cifar.fingerprint(x, np.roll(y, 1)) != whole
    x.reshape(20, -1)[image, pixel] ^= change
    assert cifar.fingerprint(x, y) != whole


def relabelled(y: np.ndarray) -> np.ndarray:
    other = y.copy()
    other[np.flatnonzero(y == 1)[0]] = 0
    return other


def test_an_archive_with_a_batch_twice_is_refused(tmp_path):
    batches = write_cifar(tmp_path / "a")
    packed = pack(batches)
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(batches, "cifar-10-batches-py")
        archive.add(batches / "test_batch", "other/data_batch_1")
    assert "holds data_batch_1 twice" in refusal(lambda: list(cifar.read_archive(packed)))


def test_what_follows_a_batch_is_refused(tmp_path):
    batch = (write_cifar(tmp_path) / "data_batch_1").read_bytes()
    assert "3 bytes follow its end" in refusal(lambda: cifar.read_batch(batch + b"abc", "batch"))


@pytest.mark.parametrize("make", [fb.tasks.cifar10, fb.tasks.celeba, fb.tasks.sent140])
def test_without_data_an_error_says_what_to_get_and_how_to_name_it(make, tmp_path, monkeypatch):
    assert "--data or FEDBUFF_DATA" in refusal(make)
    assert "no such folder" in refusal(lambda: make(str(tmp_path / "nowhere")))
    monkeypatch.setenv("FEDBUFF_DATA", str(tmp_path / "nowhere"))
    assert "FEDBUFF_DATA=" in refusal(make)
    monkeypatch.setenv("FEDBUFF_DATA", str(tmp_path))
    (tmp_path / "notes.txt").touch()
    said = refusal(make)
    assert "is missing; get it from http" in said and f"{tmp_path} holds notes.txt" in said


# ── CelebA ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def jpeg(colour=(200, 10, 90), size=(32, 32)) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "JPEG", quality=95)
    return file.getvalue()


def write_celeba(folder: Path, people: dict[int, int], inside: str = "img_align_celeba/", **attributes: str) -> Path:
    """`people` is how many images of each there are; smiling is whoever is on an image with an even number."""
    folder.mkdir(parents=True, exist_ok=True)
    owners = [person for person, count in people.items() for _ in range(count)]
    names = [f"{i:06}.jpg" for i in range(1, len(owners) + 1)]
    with zipfile.ZipFile(folder / celeba.ARCHIVE, "w") as archive:
        for i, name in enumerate(names, 1):
            archive.writestr(f"{inside}{name}", jpeg((i * 7 % 256, 0, 0)))
    (folder / celeba.IDENTITIES).write_text("".join(f"{n} {o}\n" for n, o in zip(names, owners, strict=True)))
    rows = "".join(f"{name} -1 {' 1' if i % 2 == 0 else '-1'}\n" for i, name in enumerate(names, 1))
    (folder / celeba.ATTRIBUTES).write_text(f"{len(names)}\nBald Smiling\n{rows}")
    return folder


@pytest.mark.parametrize("inside", ["", "img_align_celeba/"])
@pytest.mark.parametrize("sub", ["", "celeba"])
def test_celebrities_are_clients_and_hold_their_own_images(tmp_path, inside, sub):
    write_celeba(tmp_path / sub, {7: 5, 3: 10, 5: 4}, inside)
    task = fb.tasks.celeba(str(tmp_path))
    assert [task.examples(c) for c in range(2)] == [9, 4]  # celebrity 3 keeps nine of ten, 7 four of five, 5 has too few
    assert len(task.splits["test"][1]) == 2
    seen = []
    for x, y in [*task.clients, (task.splits["test"][0][:], task.splits["test"][1])]:
        for image, label in zip(x, y, strict=True):
            number = round(float((image[0].mean() * 0.5 + 0.5) * 255) / 7)  # as written in its colour
            assert label == (number % 2 == 0)
            assert np.abs(image).max() <= 1
            seen.append(number)
    assert sorted(seen) == list(range(1, 16))
    assert sorted(seen[:9] + seen[-2:-1]) == list(range(6, 16))  # those of celebrity 3, whose held-out one comes first
    assert task.name == "celeba (subset: 15 images of 2 clients)"
    assert fb.tasks.celeba(str(tmp_path), min_images=10).name == "celeba (10 images per client)"


def test_whole_clients_can_be_held_out_instead(tmp_path):
    write_celeba(tmp_path, dict.fromkeys(range(20), 5))
    task = fb.tasks.celeba(str(tmp_path), hold_out="clients")
    assert (len(task.clients), len(task.splits["test"][1])) == (18, 10)
    assert {task.examples(c) for c in range(18)} == {5}


def test_an_image_is_resized_and_its_middle_cut_out():
    """178 × 218 becomes 32 × 39, of which four rows go at the top and three at the bottom, as in torchvision."""
    from PIL import Image

    pixels = np.zeros((218, 178, 3), np.uint8)
    pixels[:, 89:, 0] = 255  # red on the right
    pixels[: round(4 * 218 / 39), :, 1] = 255  # green in the four rows at the top
    pixels[round(36 * 218 / 39) :, :, 2] = 255  # blue in the three rows at the bottom
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=100, subsampling=0)
    image = celeba.decode(file.getvalue())
    assert image.shape == (3, 32, 32)
    assert image[0, :, :15].max() < 40 and image[0, :, 17:].min() > 215
    assert image[1, 2:].max() < 60 and image[2, :-2].max() < 60
    exact = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(exact).save(file, "JPEG", quality=95)
    assert np.array_equal(celeba.decode(file.getvalue()), np.asarray(Image.open(file)).transpose(2, 0, 1))


@pytest.mark.parametrize("name", [celeba.ARCHIVE, celeba.IDENTITIES, celeba.ATTRIBUTES])
def test_each_missing_file_of_celeba_is_named(tmp_path, name):
    (write_celeba(tmp_path, {1: 5}) / name).unlink()
    assert f"{name} is missing; get it from https://mmlab.ie.cuhk.edu.hk" in refusal(lambda: fb.tasks.celeba(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        (
            celeba.IDENTITIES,
            lambda b: b.replace(b"000003.jpg 1\n", b""),
            "000003.jpg is in list_attr_celeba.txt but not in identity",
        ),
        (celeba.IDENTITIES, lambda b: b + b"000099.jpg 1\n", "000099.jpg is in identity_CelebA.txt but not in list_attr"),
        (celeba.IDENTITIES, lambda b: b + b"000003.jpg 1\n", "line 6: 000003.jpg is listed twice"),
        (celeba.IDENTITIES, lambda b: b.replace(b"000002.jpg 1", b"000002.jpg x"), "line 2: expected an image and the number"),
        (celeba.IDENTITIES, lambda b: b"\xff\xfe" + b, "not a text file"),
        (celeba.IDENTITIES, lambda b: b"", "lists no images"),
        (celeba.IDENTITIES, lambda b: b[:-2], "line 5: expected an image and the number of a celebrity, found '000005.jpg '"),
        (
            celeba.ATTRIBUTES,
            lambda b: b.replace(b"Smiling", b"Frowning"),
            "with Smiling among them, found '5' and 'Bald Frowning'",
        ),
        (celeba.ATTRIBUTES, lambda b: b[:-17], "lists 5 images, but lists 4; is it cut off?"),
        (celeba.ATTRIBUTES, lambda b: b[:-3], "line 7: expected an image and 2 times 1 or -1"),
        (
            celeba.ATTRIBUTES,
            lambda b: b.replace(b"000003.jpg -1 -1", b"000003.jpg -1 7"),
            "line 5: expected an image and 2 times",
        ),
        (
            celeba.ATTRIBUTES,
            lambda b: b.replace(b"000003.jpg -1 -1", b"000003.jpg 0 -1"),
            "line 5: expected an image and 2 times",
        ),
        (celeba.ATTRIBUTES, lambda b: b.replace(b"000003.jpg", b"000002.jpg"), "line 5: 000002.jpg is listed twice"),
        (celeba.ARCHIVE, lambda b: zipped({"a/000001.jpg": jpeg(), "b/000001.jpg": jpeg()}), "holds 000001.jpg twice"),
        (celeba.ATTRIBUTES, lambda b: b"", "expected the number of images and the names"),
        (celeba.ARCHIVE, lambda b: b[: len(b) // 2], "not a whole ZIP file"),
        (celeba.ARCHIVE, lambda b: b"PK", "not a whole ZIP file"),
        (celeba.ARCHIVE, lambda b: zipped({"readme.txt": b""}), "holds no .jpg"),
        (celeba.ARCHIVE, lambda b: zipped({"000077.jpg": jpeg()}), "000077.jpg is in neither identity_CelebA.txt nor"),
        (
            celeba.ARCHIVE,
            lambda b: zipped({"000001.jpg": b"GIF89a"}),
            "can't be read (cannot identify image as a JPEG); get it",
        ),
        (celeba.ARCHIVE, lambda b: zipped({"000001.jpg": jpeg()[:300]}), "000001.jpg can't be read"),
        (celeba.ARCHIVE, lambda b: zipped({"000001.jpg": jpeg(size=(5000, 5000))}), "5000 × 5000 pixels are too many"),
        (celeba.ARCHIVE, lambda b: b.replace(jpeg((7, 0, 0))[200:400], bytes(200)), "000001.jpg can't be read (Bad CRC-32"),
    ],
)
def test_wrong_files_of_celeba_are_refused(tmp_path, name, change, complaint):
    path = write_celeba(tmp_path, {1: 5}) / name
    path.write_bytes(change(path.read_bytes()))
    assert complaint in refusal(lambda: fb.tasks.celeba(str(tmp_path)))


def test_what_other_systems_add_to_files_of_celeba_does_not_matter(tmp_path):
    """A byte order mark, CRLF, and what macOS keeps beside every file of an archive."""
    plain, odd = (write_celeba(tmp_path / name, {1: 5, 2: 6}) for name in ("plain", "odd"))
    for name in (celeba.IDENTITIES, celeba.ATTRIBUTES):
        (odd / name).write_bytes(b"\xef\xbb\xbf" + (odd / name).read_bytes().replace(b"\n", b"\r\n"))
    with zipfile.ZipFile(odd / celeba.ARCHIVE, "a") as archive:
        archive.writestr("__MACOSX/img_align_celeba/._000001.jpg", b"\0\5\x16\7")
    a, b = (fb.tasks.celeba(str(folder)) for folder in (plain, odd))
    assert all(np.array_equal(p, q) for c, d in zip(a.clients, b.clients, strict=True) for p, q in zip(c, d, strict=True))


def zipped(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def test_a_task_needs_enough_images(tmp_path):
    write_celeba(tmp_path, {1: 3, 2: 1})
    assert "min_images=5: " in (said := refusal(lambda: fb.tasks.celeba(str(tmp_path)))) and "at most 3" in said
    assert "hold_out='users'" in refusal(lambda: fb.tasks.celeba(str(tmp_path), hold_out="users"))


@often
@given(damage(), st.sampled_from([celeba.ARCHIVE, celeba.IDENTITIES, celeba.ATTRIBUTES]))
def test_damaged_files_of_celeba_are_loaded_or_refused(tmp_path_factory, harm, name):
    whole = tmp_path_factory.getbasetemp() / "faces"
    if not whole.exists():
        write_celeba(whole, {1: 2, 2: 1})
    folder = tmp_path_factory.getbasetemp() / "damaged faces"
    folder.mkdir(exist_ok=True)
    for file in whole.iterdir():
        (folder / file.name).write_bytes(harm(file.read_bytes()) if file.name == name else file.read_bytes())
    sources = [folder / n for n in (celeba.ARCHIVE, celeba.IDENTITIES, celeba.ATTRIBUTES)]
    loads_or_refuses(lambda: celeba.prepare(sources, lambda _, shape, dtype: np.zeros(shape, dtype)))


@pytest.mark.parametrize("seed", range(3))
def test_leaf_keeps_nine_tenths_of_each_client(seed):
    from fedbuff.learn.partition import some_of_each

    owners = np.random.default_rng(seed).integers(0, 40, 300)
    out = some_of_each(owners, 0.9, np.random.default_rng(seed))
    for owner in np.unique(owners):
        n = int((owners == owner).sum())
        assert (out & (owners == owner)).sum() == (n - max(1, int(0.9 * n)))


# ── Sent140 ──────────────────────────────────────────────────────────────────────────────────────────────────────────

TWEETS = [
    ("0", "bob", "Bad day, BAD day!"),
    ("4", "ann", "I'm so happy"),
    ("4", "ann", "zzz qqq"),
    ("0", "cem", "good day " * 20),
    ("4", "dan", 'caf\xe9 "quoted", fine'),
    ("0", "eve", ""),
]
OPEN = b'"0","1","d","N","u","open\n'
GLOVE = "day 1 2 3\nbad -1 -2 -3\nunused 9 9 9\ngood 0.5 0 1e-1\n! 4 4 4\nso 2 2 2\n"


def write_sent140(folder: Path, tweets=TWEETS, words: str = GLOVE, subfolders: bool = True) -> Path:
    for sub in ("sent140", "glove"):
        (folder / (sub if subfolders else "")).mkdir(parents=True, exist_ok=True)
    with (folder / ("sent140" if subfolders else "") / sent140.FILE).open("w", encoding="latin-1", newline="") as f:
        writer = csv.writer(f, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerows((label, i, "Mon Apr 06", "NO_QUERY", account, text) for i, (label, account, text) in enumerate(tweets))
    (folder / ("glove" if subfolders else "") / "glove.6B.3d.txt").write_text(words, encoding="utf-8")
    return folder


def many(accounts: int) -> list[tuple[str, str, str]]:
    return [("0" if a % 2 else "4", f"account {a}", "day " * (1 + t)) for a in range(accounts) for t in range(1 + a % 3)]


def arrays_of(folder: Path, vocabulary: int = 100, tokens: int = 6) -> dict[str, np.ndarray]:
    made: dict[str, np.ndarray] = {}

    def new(name, shape, dtype):
        return made.setdefault(name, np.zeros(shape, dtype))

    sent140.prepare([folder / "sent140" / sent140.FILE, folder / "glove" / "glove.6B.3d.txt"], vocabulary, tokens, new)
    return made


def test_tweets_become_numbers_of_words_account_by_account(tmp_path):
    a = arrays_of(write_sent140(tmp_path))
    # by how common they are: day (22), good (20), bad (2), then ! and so; 0 is padding, 1 any other word
    assert a["vectors"][2:].tolist() == [[1, 2, 3], [0.5, 0, np.float32(0.1)], [-1, -2, -3], [4, 4, 4], [2, 2, 2]]
    assert a["vectors"][0].tolist() == [0, 0, 0]
    assert a["vectors"][1] == pytest.approx(a["vectors"][2:].mean(0))
    assert a["x"].tolist() == [
        [0, 0, 1, 1, 6, 1],  # ann: i 'm so happy
        [0, 0, 0, 0, 1, 1],
        [4, 2, 1, 4, 2, 5],  # bob
        [3, 2, 3, 2, 3, 2],  # cem, cut off
        [0, 0, 1, 1, 1, 1],  # dan
        [0, 0, 0, 0, 0, 0],  # eve
    ]
    assert a["owners"].tolist() == [0, 0, 1, 2, 3, 4]
    assert a["y"].tolist() == [1, 1, 0, 0, 1, 0]


def test_the_vocabulary_keeps_the_commonest_words(tmp_path):
    a = arrays_of(write_sent140(tmp_path), vocabulary=2)
    assert a["vectors"].shape == (4, 3)
    assert a["x"].max() == 3 and a["x"][2].tolist() == [1, 2, 1, 1, 2, 1]


@pytest.mark.parametrize("subfolders", [True, False])
def test_accounts_are_clients_and_are_held_out_whole(tmp_path, subfolders):
    write_sent140(tmp_path, many(30), subfolders=subfolders)
    task = fb.tasks.sent140(str(tmp_path))
    assert task.name == "sent140 (subset: 60 tweets)"
    assert list(task.splits) == ["validation", "test"]
    assert len(task.clients) == 24
    parts = [sum(task.examples(c) for c in range(24)), *(len(y) for _, y in task.splits.values())]
    assert sum(parts) == 60 and min(parts) >= 3
    for x, y in task.clients:  # an account's tweets have one, two, three times the same word, and one sentiment
        assert sorted((x > 0).sum(1)) == list(range(1, len(y) + 1)) and len(set(y)) == 1
    again = fb.tasks.sent140(str(tmp_path))
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(task.clients, again.clients, strict=True))


def test_accounts_are_drawn_until_they_have_their_share(tmp_path):
    write_sent140(tmp_path, many(30))
    name = fb.tasks.sent140(str(tmp_path), share=0.5).name
    assert name in {f"sent140 (subset: {n} tweets)" for n in (30, 31, 32)}
    assert fb.tasks.sent140(str(tmp_path), min_tweets=3).name == "sent140 (subset: 30 tweets)"
    assert "min_tweets=4, share=1: 0 accounts are left" in refusal(lambda: fb.tasks.sent140(str(tmp_path), min_tweets=4))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("tweets", lambda b: b"", "an empty file; get it from http://help.sentiment140.com"),
        ("tweets", lambda b: b[:-10], "line 6: expected six columns, the first 0 or 4, found 4 columns"),
        ("tweets", lambda b: b[:-2], "line 6: a quote that is not closed"),
        ("tweets", lambda b: b[:100] + bytes(50) + b[150:], "not CSV (it holds a zero byte)"),
        (
            "tweets",
            lambda b: b.replace(b'"Mon Apr 06",', b"", 1),
            "line 1: expected six columns, the first 0 or 4, found 5 columns",
        ),
        (
            "tweets",
            lambda b: b'"target","ids","date","flag","user","text"\n' + b,
            "line 1: expected six columns, the first 0 or 4, found p",
        ),
        ("tweets", lambda b: b.replace(b'"0"', b'"2"', 1), "found polarity '2'"),
        ("tweets", lambda b: b"\n" + b, "line 1: expected six columns, the first 0 or 4, found 0 columns"),
        ("tweets", lambda b: b"\xef\xbb\xbf" + b, "not CSV ('utf-8' codec can't decode byte 0xe9"),
        ("tweets", lambda b: b + b'"' + bytes(200_000) + b"\n", "not CSV"),
        ("tweets", lambda b: b + OPEN + b"0,1,d,N,u,text\n0,1,d,N,u,text\n", "line 7: a quote that is not closed"),
        ("tweets", lambda b: b + OPEN, "line 7: a quote that is not closed"),
        ("tweets", lambda b: b"\n\r\n", "holds no tweet"),
        ("tweets", lambda b: b"\xef\xbb\xbf\n", "holds no tweet"),
        ("glove", lambda b: b"", "an empty file"),
        ("glove", lambda b: b[:-4], "line 6: a word with 2 numbers, but 3 on the lines before"),
        (
            "glove",
            lambda b: b.replace(b"bad -1 -2 -3", b"bad -1 -2"),
            "line 2: a word with 2 numbers, but 3 on the lines before",
        ),
        ("glove", lambda b: b"400000 3\n" + b, "line 2: a word with 3 numbers, but 1 on the lines before"),
        ("glove", lambda b: b.replace(b"bad -1", b"bad x"), "line 2: expected a word and numbers"),
        ("glove", lambda b: b.replace(b"bad -1", b"bad nan"), "line 2: its numbers are not finite"),
        ("glove", lambda b: b"\xff\xff" + b, "not text in UTF-8"),
        ("glove", lambda b: b"nothing 1 2\nhere 1 2\n", "knows none of the tweets' words"),
        ("glove", lambda b: b"words\nonly\n", "line 1: a word with 0 numbers; is it GloVe?"),
    ],
)
def test_wrong_files_of_sent140_are_refused(tmp_path, name, change, complaint):
    write_sent140(tmp_path)
    path = tmp_path / ("sent140/" + sent140.FILE if name == "tweets" else "glove/glove.6B.3d.txt")
    path.write_bytes(change(path.read_bytes()))
    said = refusal(lambda: fb.tasks.sent140(str(tmp_path)))
    assert complaint in said and path.name in said


def test_a_last_line_may_lack_its_end(tmp_path):
    write_celeba(tmp_path, {1: 5, 2: 5})
    write_sent140(tmp_path, many(30))
    before = fb.tasks.celeba(str(tmp_path)), fb.tasks.sent140(str(tmp_path))
    for name in (celeba.IDENTITIES, celeba.ATTRIBUTES, sent140.FILE, "glove.6B.3d.txt"):
        (path,) = tmp_path.rglob(name)
        path.write_bytes(path.read_bytes().rstrip(b"\n"))
    for made, task in zip(before, (fb.tasks.celeba(str(tmp_path)), fb.tasks.sent140(str(tmp_path))), strict=True):
        assert all(
            np.array_equal(a, b)
            for one, other in zip(made.clients, task.clients, strict=True)
            for a, b in zip(one, other, strict=True)
        )


def test_tweets_may_have_a_byte_order_mark_and_blank_lines_at_the_end(tmp_path):
    path = write_sent140(tmp_path) / "sent140" / sent140.FILE
    tweets = list(sent140.read_tweets(path))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().decode("latin-1").encode() + b"\n\r\n")
    assert list(sent140.read_tweets(path)) == tweets


def test_the_file_of_word_vectors_is_found_or_named(tmp_path):
    write_sent140(tmp_path, many(9))
    (tmp_path / "glove.6B.2d.txt").write_text("day 1 2\n")
    said = refusal(lambda: fb.tasks.sent140(str(tmp_path)))
    assert "choose one of glove.6B.2d.txt, glove.6B.3d.txt" in said and '[task.sent140] glove = "NAME"' in said
    assert fb.tasks.sent140(str(tmp_path), glove="glove.6B.2d.txt").model().embedding.weight.shape == (3, 2)
    assert "glove.27B.txt is missing" in refusal(lambda: fb.tasks.sent140(str(tmp_path), glove="glove.27B.txt"))
    (tmp_path / "glove" / "glove.6B.300d.txt").write_text("day 1 2 3 4\n")  # the paper's
    assert fb.tasks.sent140(str(tmp_path)).model().embedding.weight.shape == (3, 4)


@often
@given(damage(), st.booleans())
def test_damaged_tweets_and_vectors_are_loaded_or_refused(tmp_path_factory, harm, of_tweets):
    folder = tmp_path_factory.getbasetemp() / "tweets"
    if not folder.exists():
        write_sent140(folder)
    path = folder / ("sent140/" + sent140.FILE if of_tweets else "glove/glove.6B.3d.txt")
    whole = path.read_bytes()
    try:
        path.write_bytes(harm(whole))
        loads_or_refuses(lambda: arrays_of(folder))
    finally:
        path.write_bytes(whole)


@given(st.text(max_size=60))
@example("I can't, won't & don't!!")
def test_a_tweet_of_any_characters_has_words(text):
    assert "".join(sent140.words(text)) in "".join(c for c in text.lower() if not c.isspace()) or sent140.words(text)


def test_a_tweet_may_have_quotes_and_lines_of_its_own(tmp_path):
    tweets = [("4", "ann", 'she said "fine"'), ("0", "bob", 'two\nlines, "quoted"'), ("4", "cem", '"')]
    path = write_sent140(tmp_path, tweets) / "sent140" / sent140.FILE
    assert list(sent140.read_tweets(path)) == [(account, int(label == "4"), text) for label, account, text in tweets]


def test_vectors_may_have_a_byte_order_mark_and_words_with_spaces(tmp_path):
    path = tmp_path / "glove.840B.3d.txt"
    path.write_text(GLOVE + ". . . 7 8 9\nat name@domain.com 1 1 1\n", encoding="utf-8-sig")
    found = glove.read_vectors(path, {"day", "so", ". . ."})
    assert {word: vector.tolist() for word, vector in found.items()} == {"day": [1, 2, 3], "so": [2, 2, 2], ". . .": [7, 8, 9]}


@pytest.mark.parametrize("line", ["bad -1 -2 -3 4", "bad -1 -2 -3good 0.5 0 1", "so so 2 2", ". . ."])
def test_a_line_of_vectors_that_lost_its_end_is_no_word_with_spaces(tmp_path, line):
    (path := tmp_path / "g.txt").write_text(f"day 1 2 3\n{line}\nso 2 2 2\n")
    assert "line 2: " in refusal(lambda: glove.read_vectors(path, {"day", "so", "bad", "."}))


def test_a_very_wide_line_of_glove_is_one_word(tmp_path):
    (path := tmp_path / "g.txt").write_text("word " + " ".join(["0.5"] * 300) + "\n")
    assert glove.read_vectors(path, {"word"})["word"].shape == (300,)


# ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────────────


def counted(path: Path, calls: list[int]) -> dict[str, np.ndarray]:
    def make(new):
        calls.append(1)
        new("a", (3, 4), np.int64)[:] = len(path.read_bytes())
        new("b", (2,), np.uint8)[:] = 7

    return prepared("thing", [path], [1], make)


def test_arrays_are_prepared_once_and_again_when_their_source_changes(tmp_path):
    path, calls = tmp_path / "source", []
    path.write_bytes(b"abc")
    for _ in range(3):
        got = counted(path, calls)
    assert len(calls) == 1 and got["a"].tolist() == [[3] * 4] * 3 and got["b"].tolist() == [7, 7]
    with pytest.raises(ValueError, match="read-only"):
        got["a"][0, 0] = 1
    path.write_bytes(b"abcd")
    assert counted(path, calls)["a"][0, 0] == 4 and len(calls) == 2
    os.utime(path, (1, 1))
    counted(path, calls)
    assert len(calls) == 3


def replace_in_disguise(path: Path) -> None:
    """By a file of the same size and time of change."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # which ticks every few milliseconds
        path.write_bytes(path.read_bytes()[::-1])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_source_that_was_replaced_in_disguise_is_read_again(tmp_path):
    path, calls = tmp_path / "source", []
    path.write_bytes(b"abc")
    counted(path, calls)
    replace_in_disguise(path)
    counted(path, calls)
    assert len(calls) == 2 and len(caches()) == 1
    counted(path, calls)
    assert len(calls) == 2


def test_a_cache_of_an_earlier_version_stays_valid(tmp_path):
    path, calls = tmp_path / "source", []
    path.write_bytes(b"abc")
    counted(path, calls)
    (caches()[0] / "ctimes.json").unlink()  # which those don't have
    replace_in_disguise(path)
    counted(path, calls)
    assert len(calls) == 1


def caches() -> list[Path]:
    return sorted(path for path in Path(os.environ["FEDBUFF_CACHE"]).iterdir() if path.is_dir())


@pytest.mark.parametrize("name", ["a.npy", "b.npy", "files.json"])
@pytest.mark.parametrize(
    "harm",
    [
        lambda p: p.unlink(),
        lambda p: p.write_bytes(b""),
        lambda p: p.write_bytes(p.read_bytes()[:-1]),
        lambda p: p.write_bytes(p.read_bytes()[:-1] + bytes([p.read_bytes()[-1] ^ 1])),
        lambda p: p.write_bytes(b"[1, 2]"),
        lambda p: p.write_bytes(b"{}"),
        lambda p: p.write_bytes(b"[" * 100_000),
    ],
)
def test_a_damaged_cache_is_made_again(tmp_path, name, harm):
    path, calls = tmp_path / "source", []
    path.write_bytes(b"abc")
    counted(path, calls)
    harm(caches()[0] / name)
    assert counted(path, calls)["a"].tolist() == [[3] * 4] * 3
    assert len(calls) == 2
    counted(path, calls)
    assert len(calls) == 2 and len(caches()) == 1


def test_a_cache_whose_list_lacks_an_array_is_made_again(tmp_path):
    path, calls = tmp_path / "source", []
    path.write_bytes(b"abc")
    counted(path, calls)
    listed = caches()[0] / "files.json"
    listed.write_text(json.dumps({"a.npy": json.loads(listed.read_text())["a.npy"]}))
    assert sorted(counted(path, calls)) == ["a", "b"]


def test_what_a_failed_or_killed_preparation_leaves_is_swept_up(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(b"abc")

    def fail(new):
        new("a", (3,), np.int64)
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        prepared("thing", [path], [1], fail)
    assert caches() == []
    left, at_work = (Path(os.environ["FEDBUFF_CACHE"]) / f".{name}.1.tmp" for name in ("thing-0", "thing-1"))
    left.mkdir()
    at_work.mkdir()
    with at_work.with_name(".thing-1.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        counted(path, [])
        assert at_work.exists() and not left.exists()
    (caches()[-1] / "a.npy").unlink()
    counted(path, [])
    assert not at_work.exists()


def test_who_finds_nothing_while_another_one_makes_it_waits_and_takes_what_was_made(tmp_path, capsys):
    """Neither makes it again nor takes it away, though it looked before it was there."""
    path, calls = tmp_path / "source", []
    path.write_bytes(b"abc")
    begun, go_on = threading.Event(), threading.Event()

    def slowly(new):
        calls.append("slow")
        begun.set()
        assert go_on.wait(30)
        new("a", (3,), np.int64)[:] = 7

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(prepared, "thing", [path], [1], slowly)
        assert begun.wait(30)
        second = threads.submit(prepared, "thing", [path], [1], lambda new: calls.append("again"))
        while "waiting for it" not in capsys.readouterr().err:
            time.sleep(0.01)
        go_on.set()
        assert first.result(30)["a"].tolist() == second.result(30)["a"].tolist() == [7, 7, 7]
    assert calls == ["slow"]


def test_where_there_are_no_locks_who_comes_second_leaves_what_is_there(tmp_path, monkeypatch):
    path, made = tmp_path / "source", []
    path.write_bytes(b"abc")

    def refuse(*_) -> None:
        raise OSError(37, "No locks available")

    def make(new) -> None:
        new("a", (3,), np.int64)[:] = 7
        if not made:  # another process is faster
            made.append("slow")
            prepared("thing", [path], [1], make)
            made.append(caches()[-1].stat().st_ino)

    monkeypatch.setattr("fcntl.flock", refuse)
    assert prepared("thing", [path], [1], make)["a"].tolist() == [7, 7, 7]
    assert made == ["slow", caches()[-1].stat().st_ino]


def test_what_another_user_left_stays_and_is_in_nobodys_way(tmp_path, monkeypatch):
    path = tmp_path / "source"
    path.write_bytes(b"abc")
    left = Path(os.environ["FEDBUFF_CACHE"]) / ".other-0.1.tmp"
    left.mkdir(parents=True)
    lock = left.with_name(".other-0.lock")
    lock.touch()
    opened = Path.open

    def refuse(self, *args, **how):
        if self == lock:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **how)

    monkeypatch.setattr(Path, "open", refuse)
    counted(path, [])
    assert left.exists()


def test_a_cache_that_can_not_be_written_says_how_to_move_it(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDBUFF_CACHE", str(tmp_path / "file"))
    said = refusal(lambda: counted(tmp_path / "file", []))
    assert "can't prepare thing" in said and "FEDBUFF_CACHE" in said


def test_processes_that_prepare_the_same_do_not_disturb_each_other(tmp_path):
    write_cifar(tmp_path, n=200)
    code = (
        f"import fedbuff as fb; t = fb.tasks.cifar10({str(tmp_path)!r}, clients=10); print(sum(y.sum() for _, y in t.clients))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    said = [p.communicate(timeout=120) for p in running]
    assert len({out for out, _ in said}) == 1 and [p.returncode for p in running] == [0] * 4, said
    assert len(caches()) == 1


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_clients_are_rows_of_shared_arrays():
    x, y = np.arange(10.0), np.arange(10)
    rows = RowClients(x, y, np.array([5, 1, 9, 0]), [1, 3])
    assert [(a.tolist(), b.tolist()) for a, b in rows] == [([5.0], [5]), ([1.0, 9.0, 0.0], [1, 9, 0])]
    assert [len(b) for _, b in rows[:2]] == [rows.examples(0), rows.examples(1)] == [1, 3]
    for client in (-1, 2):
        with pytest.raises(IndexError):
            rows[client]


def test_scaled_images_are_arrays_to_whoever_asks():
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 4), dtype=np.uint8)
    scaled = Scaled(images, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    expected = (images / 255 - np.array([0.1, 0.2, 0.3])[:, None, None]) / np.array([0.4, 0.5, 0.6])[:, None, None]
    assert np.asarray(scaled) == pytest.approx(expected, abs=1e-5)
    assert scaled[1:3] == pytest.approx(expected[1:3], abs=1e-5)
    assert (len(scaled), scaled.shape, scaled.dtype) == (5, images.shape, np.float32)


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def weights_of(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_cnn_is_flsims():
    """Written out layer by layer: stride 1, padding 2, one norm for all, dropout only before the head."""
    F = torch.nn.functional  # noqa: N806
    model = fb.models.cnn()((3, 32, 32), 10)
    assert weights_of(model) == 31_594
    x = torch.randn(4, 3, 32, 32)
    named, h = dict(model.named_parameters()), x
    with torch.no_grad():
        named["block.0.weight"].copy_(torch.rand(32))
        for i in range(4):
            h = F.conv2d(h, named[f"convolutions.{i}.weight"], named[f"convolutions.{i}.bias"], stride=1, padding=2)
            mean, var = h.mean((2, 3), keepdim=True), h.var((2, 3), keepdim=True, correction=0)
            h = (h - mean) / (var + 1e-5).sqrt() * named["block.0.weight"][:, None, None] + named["block.0.bias"][:, None, None]
            h = F.max_pool2d(h.relu(), 2)
        expected = h.flatten(1) @ named["output.weight"].T + named["output.bias"]
        assert torch.allclose(model.eval()(x), expected, atol=1e-4)
        model.train()
        assert not torch.equal(model(x), model(x))
    assert weights_of(fb.models.cnn()((3, 32, 32), 2)) == 29_282


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 64, 48), (2, 1, 1)])
def test_the_cnn_takes_images_of_any_size(shape):
    assert fb.models.cnn(channels=8, convolutions=3)(shape, 5)(torch.randn(2, *shape)).shape == (2, 5)


def test_the_lstm_is_the_papers_and_its_embeddings_are_not_trained():
    vectors = np.random.default_rng(0).normal(size=(12, 300)).astype(np.float32)
    model = fb.models.lstm()(vectors, 2)
    gates = sum(4 * 100 * (inputs + 100 + 2) for inputs in (300, 100))
    assert weights_of(model) == gates + 100 * 128 + 128 + 128 * 2 + 2
    assert model.lstm.dropout == 0.1 and model.lstm.num_layers == 2
    assert np.array_equal(model.embedding.weight.numpy(), vectors)
    assert fb.models.lstm(layers=1)(vectors, 3)(torch.ones(4, 7, dtype=torch.long)).shape == (4, 3)


@pytest.mark.parametrize("model", [fb.models.cnn(), fb.models.mlp(), fb.models.linear()])
def test_models_of_images_are_trained_many_clients_at_once(tmp_path, model):
    write_cifar(tmp_path)
    for clients in (6, 12):  # with six, a near-tie in float32 makes a second look in double precision necessary
        task = fb.tasks.cifar10(str(tmp_path), clients=clients, model=model)
        flat, _ = initial_weights(task, 0)
        assert why_not(task, SGD, 0, flat) is None


@pytest.mark.parametrize("model", [fb.models.lstm(), fb.models.mlp(), fb.models.linear()])
def test_models_of_text_are_trained_many_clients_at_once(tmp_path, model):
    write_sent140(tmp_path, many(30))
    task = fb.tasks.sent140(str(tmp_path), model=model)
    flat, weights = initial_weights(task, 0)
    assert why_not(task, SGD, 0, flat) is None
    embedding = next(p for name, p in flat.module.named_parameters() if not p.requires_grad)
    assert embedding.shape == (3, 3) and len(weights) == weights_of(flat.module)


def test_a_linear_model_of_text_sees_the_mean_of_the_words_without_padding():
    from fedbuff.learn.models import text_model

    vectors = np.array([[0, 0], [1, 2], [3, 5]], np.float32)
    model = text_model(fb.models.linear(), vectors, 2)
    (seen,) = model[0](torch.tensor([[0, 0, 1, 2, 2]]))
    assert seen.tolist() == pytest.approx([7 / 3, 4])


# ── Hugging Face ─────────────────────────────────────────────────────────────────────────────────────────────────────


class StandIn:
    """As much of `datasets.Dataset` as is used."""

    def __init__(self, **columns: object) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))  # type: ignore[arg-type]

    def with_format(self, kind: str) -> "StandIn":
        assert kind == "numpy"
        return self

    def __getitem__(self, rows: slice) -> dict[str, np.ndarray]:
        return {name: np.asarray(column)[rows] for name, column in self.columns.items()}


def real(**columns: object):
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


@pytest.mark.parametrize("make", [StandIn, real])
def test_hugging_face_datasets_are_split_by_a_column(make):
    train = make(x=[[1.0, 2], [3, 4], [5, 6], [7, 8]], label=[0, 1, 2, 0], who=["ann", "bob", "ann", "cem"])
    task = fb.tasks.hugging_face(train, make(x=[[0.0, 0]], label=[1]), by="who")
    assert [(x.tolist(), y.tolist()) for x, y in task.clients] == [([[1, 2], [5, 6]], [0, 2]), ([[3, 4]], [1]), ([[7, 8]], [0])]
    assert task.model()(torch.zeros(1, 2)).shape == (1, 3)
    assert task.clients[0][0].dtype == np.float32
    run = fb.simulate(fb.Server(start=fb.refill(1), buffer_size=1), task, client=SGD, until=fb.trips(3))
    assert run.summary["trips"] == 3


@pytest.mark.parametrize("make", [StandIn, real])
def test_hugging_face_datasets_are_split_by_a_partition_or_come_in_parts(make):
    some = [make(x=[[float(i)]] * (i + 1), label=[i % 2] * (i + 1)) for i in range(4)]
    task = fb.tasks.hugging_face(some, some[0])
    assert [len(y) for _, y in task.clients] == [1, 2, 3, 4]
    whole = make(x=[[float(i)] for i in range(40)], label=[i % 2 for i in range(40)])
    assert len(fb.tasks.hugging_face(whole, whole, clients=7, split=fb.iid()).clients) == 7


@pytest.mark.parametrize("make", [StandIn, real])
def test_hugging_face_images_get_their_channels_first(make):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 6, 3), dtype=np.uint8)
    if make is real:
        datasets = pytest.importorskip("datasets")
        from PIL import Image

        columns = {"image": [Image.fromarray(p) for p in pixels], "label": [0, 1, 0, 1]}
        data = datasets.Dataset.from_dict(
            columns, datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        )
    else:
        data = make(image=pixels, label=[0, 1, 0, 1])
    task = fb.tasks.hugging_face(data, data, clients=2, split=fb.iid(), model=fb.models.cnn(channels=8))
    held = np.asarray(task.splits["test"][0])
    assert held == pytest.approx(pixels.transpose(0, 3, 1, 2) / 255, abs=1e-6)
    assert task.model()(torch.tensor(held)).shape == (4, 2)


def test_a_folder_of_hugging_face_is_a_table_in_a_settings_file(tmp_path, fedbuff):
    real(x=[[1.0], [2.0]] * 20, label=[0, 1] * 20).save_to_disk(tmp_path / "train")
    real(x=[[1.0], [2.0]], label=[0, 1]).save_to_disk(tmp_path / "test")
    (tmp_path / "s.toml").write_text(
        '[task.hugging_face]\ntrain = "train"\ntest = "test"\nclients = 5\n'
        "[algorithm.fedbuff]\nconcurrency = 2\nbuffer_size = 2\n[client]\nlr = 0.1\n[until]\ntrips = 4"
    )
    fedbuff("run", "s.toml", "--out", "run", "--quiet")
    kept = tomllib.loads((tmp_path / "run" / "settings.toml").read_text())["task"]["hugging_face"]
    assert (kept["train"], kept["clients"]) == (str(tmp_path / "train"), 5)
    fedbuff("run", "--resume", "--out", "run", "--quiet")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"label": "y"}, "label='y': no such column; there are x, label"),
        ({"inputs": "pixels"}, "train: no column 'pixels'"),
        ({"by": "who"}, "by='who': no such column"),
        ({"by": "who", "train": StandIn(x=[1], z=[2], label=[0])}, "by='who': no such column; there are x, z, label"),
        ({"by": "x", "train": [StandIn(x=[1], label=[0])]}, "by='x': train is a list of partitions, one for each client"),
        ({"train": []}, "train: expected at least one partition"),
        ({"train": StandIn(x=[], label=[])}, "train: holds no examples"),
        ({"train": StandIn(x=["a", "b"], label=[0, 1])}, "train: expected inputs of numbers"),
        ({"train": StandIn(x=[[1.0], [2.0]], label=[0.5, 1.5])}, "whole labels, found x of float64 and label of float64"),
        ({"train": StandIn(x=[[1.0], [2.0]], label=[0, -1])}, "train: expected labels from 0 on, found -1"),
        (
            {"train": StandIn(x=[[1.0], [2.0]], label=[0, 10**9])},
            "train: label 1000000000 would make 1,000,000,001 classes for 4",
        ),
        ({"train": StandIn(x=[[1.0, 2.0]], label=[0])}, "test: expected inputs of shape (2,) as in train, found (1,)"),
        (
            {"train": [StandIn(x=[[1.0]], label=[0]), StandIn(x=[[np.nan]], label=[0])]},
            "train[1]: expected inputs that are finite",
        ),
        ({"train": StandIn(x=[1], z=[2], label=[0])}, "inputs: name one of the columns x, z"),
        ({"by": "x", "inputs": "x"}, "by='x': expected a column with a number or a name for each example, found ndarray"),
        ({"train": 3}, "train: expected a datasets.Dataset, loaded without streaming, found int"),
        ({"train": [3]}, "train[0]: expected a datasets.Dataset, loaded without streaming, found int"),
        ({"train": {"a": 1, "b": 2}}, "train: holds several splits, a, b; give one of them, like data['a']"),
        ({"test": {"a": 1, "b": 2}}, "test: holds several splits, a, b; give one of them, like data['a']"),
        ({"train": "nowhere"}, "train='nowhere': not a folder that Dataset.save_to_disk wrote"),
    ],
)
def test_what_hugging_face_can_not_be_used_for_is_said(change, complaint):
    good = StandIn(x=[[1.0], [2.0]], label=[0, 1])
    if change.get("train") == "nowhere":
        pytest.importorskip("datasets")
    assert complaint in refusal(lambda: fb.tasks.hugging_face(**{"train": good, "test": good, "clients": 2, **change}))


def test_hugging_face_classes_of_the_same_name_have_the_same_number():
    datasets = pytest.importorskip("datasets")

    def data(*names):
        columns = {"x": datasets.Sequence(datasets.Value("float32")), "label": datasets.ClassLabel(names=list(names))}
        return datasets.Dataset.from_dict({"x": [[1.0], [2.0]], "label": ["cat", "dog"]}, datasets.Features(columns))

    cats, dogs = data("cat", "dog"), data("dog", "cat")
    complaint = "its classes are dog, cat, those of train cat, dog; give them the same numbers"
    assert f"test: {complaint}" in refusal(lambda: fb.tasks.hugging_face(cats, dogs, clients=2))
    assert "train[1]: its classes are dog, cat, those of train[0]" in refusal(lambda: fb.tasks.hugging_face([cats, dogs], cats))
    assert len(fb.tasks.hugging_face([cats, cats], cats).clients) == 2


def test_an_example_of_nobody_is_no_client_of_hugging_faces():
    data = real(x=[[1.0], [2.0], [3.0]], label=[0, 1, 1], user=[1.0, float("nan"), float("nan")])
    named = real(x=[[1.0], [2.0], [3.0]], label=[0, 1, 1], user=["ann", None, None])
    for some in (data, named):
        complaint = refusal(lambda some=some: fb.tasks.hugging_face(some, some, by="user"))
        assert "by='user': 2 of 3 examples have none (None or NaN)" in complaint


@pytest.mark.parametrize(("mode", "white"), [("1", 1), ("L", 255), ("I;16", 65_535)])
def test_hugging_face_images_of_any_depth_are_images(mode, white):
    datasets, images = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    grey = np.array([[0, 1], [1, 0]])
    image = images.fromarray(grey.astype(bool) if mode == "1" else (grey * white).astype("u1" if mode == "L" else "u2"))
    assert image.mode == mode
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({"image": [image, image], "label": [0, 1]}, features)
    x, _ = fb.tasks.hugging_face(data, data, clients=2).evaluate
    assert x.shape == (2, 1, 2, 2)
    assert np.array_equal(x[0, 0], grey)


def test_a_streaming_dataset_of_hugging_face_is_refused():
    data = real(x=[[1.0]], label=[0])
    assert "found IterableDataset" in refusal(lambda: fb.tasks.hugging_face(data.to_iterable_dataset(), data))


def test_a_saved_set_of_splits_says_how_to_choose_one(tmp_path):
    data = real(x=[[1.0], [2.0]], label=[0, 1])
    pytest.importorskip("datasets").DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path)
    said = refusal(lambda: fb.tasks.hugging_face(str(tmp_path), data))
    assert (
        f"train={str(tmp_path)!r}: holds several splits, train, test; name the folder of one, like '{tmp_path}/train'" in said
    )
    assert len(fb.tasks.hugging_face(f"{tmp_path}/train", f"{tmp_path}/test", clients=2).clients) == 2


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("state.json", "[]", "not a folder that Dataset.save_to_disk wrote (list indices"),
        ("dataset_info.json", "[]", "not a folder that Dataset.save_to_disk wrote ('list' object"),
        (None, "", "holds no examples"),
    ],
)
def test_a_wrong_folder_of_hugging_face_is_named(tmp_path, name, content, complaint):
    data = real(x=[[1.0]], label=[0])
    (data if name else data.select([])).save_to_disk(tmp_path)
    if name:
        (tmp_path / name).write_text(content)
    assert f"test={str(tmp_path)!r}: {complaint}" in refusal(lambda: fb.tasks.hugging_face(data, str(tmp_path)))


def test_images_that_are_none_are_refused_by_name(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": [{"bytes": b"not an image", "path": None}] * 6, "label": [0, 1] * 3}
    data = datasets.Dataset.from_dict(rows, features=features)
    assert refusal(lambda: fb.tasks.hugging_face(data, data, clients=2)).startswith(
        "train: can't be read (cannot identify image"
    )


# ── LEAF ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_leaf(folder: Path, **files: object) -> str:
    """`train` and `test` with a file of these names each: users by name, or any other JSON, or text."""
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for name, users in files.items():
            data = {"users": list(users), "user_data": users} if isinstance(users, dict) else users
            (folder / split / f"{name}.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return str(folder)


def user(x: object = ((1, 2), (3, 4)), y: object = (0, 1)) -> dict[str, object]:
    return {"x": x, "y": y}


def test_users_of_leaf_are_clients_in_order_of_files_and_users(tmp_path):
    folder = write_leaf(
        tmp_path, b={"cem": user()}, a={"bob": user([[5.0, 6.0]], ["2"]), "ann": user(y=[1.0, True]), "eve": user([], [])}
    )
    task = fb.tasks.leaf(folder)
    assert [y.tolist() for _, y in task.clients] == [[2], [1, 1], [0, 1]]
    assert task.clients[0][0].tolist() == [[5, 6]]
    assert {(x.dtype.name, y.dtype.name) for x, y in task.clients} == {("float32", "int64")}
    assert task.model()[1].weight.shape == (3, 2)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([], "expected a list of users, and user_data with x and y, found list"),
        ([1], "expected a list of users, and user_data with x and y, found list"),
        ("null", "expected a list of users, and user_data with x and y, found NoneType"),
        ('{"users": "ab", "user_data": {}}', "found users: str, user_data: dict"),
        ('{"users": ["ann"], "user_data": {}}', "user_data has nothing for ann"),
        ('{"users": [], "user_data": {"ann": {"x": [], "y": []}}}', "user_data has ann, who is none of its users"),
        (
            '{"users": ["ann"], "num_samples": [3], "user_data": {"ann": {"x": [[1]], "y": [0]}}}',
            "user 'ann': expected 3 examples, as num_samples says, found 1",
        ),
        ('{"users": [], "num_samples": [3], "user_data": {}}', "expected num_samples for each of its 0 users"),
        ('{"users": [["ann"]], "user_data": {}}', "user_data has nothing for ['ann']"),
        ("[" * 100_000, "not readable as JSON: maximum recursion depth"),
        ({"ann": [1]}, "user 'ann': not a LEAF file: expected x and y, found list"),
        ({"ann": {"x": [[1]]}}, "user 'ann': not a LEAF file: expected x and y, found x: list"),
        (
            {"ann": user(), "bob": user(y=[0, 0.7])},
            "user 'bob': expected the numbers of classes, 0, 1, 2, …, as labels, found 0.7",
        ),
        (
            {"ann": user(), "bob": user(y=[-100, 1])},
            "user 'bob': expected the numbers of classes, 0, 1, 2, …, as labels, found -100",
        ),
        ({"ann": user(y=[0, -1])}, "as labels, found -1"),
        ({"ann": user(y=[0, 10**30])}, "as labels, found 1e+30"),
        ({"ann": user(y=[0, float("nan")])}, "as labels, found nan"),
        ({"ann": user(y=[0, 10**400])}, "x and y must be numbers"),
        ({"ann": user(y=[0, None])}, "as labels, found nan"),
        ({"ann": user(y=[0, 10**9])}, "user 'ann': label 1000000000 would make 1,000,000,001 classes for 4 examples"),
        ({"ann": user(y=[0])}, "expected a label for each input, found x of shape (2, 2) and y of shape (1,)"),
        ({"ann": user(y=[[0], [1]])}, "found x of shape (2, 2) and y of shape (2, 1)"),
        ({"ann": user(3, 3)}, "found x of shape () and y of shape ()"),
        ({"ann": user(), "bob": user([[1], [2]])}, "user 'bob': expected inputs of shape (2,) as in"),
        ({"ann": user([[1, 2], [float("nan"), 4]])}, "user 'ann': expected inputs that are finite in float32, found nan"),
        ({"ann": user([[1, 2], [1e300, 4]])}, "user 'ann': expected inputs that are finite in float32, found inf"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_wrong_file_of_leaf_is_refused_by_name(tmp_path, content, complaint):
    said = refusal(lambda: fb.tasks.leaf(write_leaf(tmp_path, file=content)))
    assert f"{tmp_path}/train/file.json: " in said and complaint in said


def test_a_folder_of_leaf_is_read_once(tmp_path, monkeypatch, capsys):
    folder = write_leaf(tmp_path / "set", file={"ann": user(), "bob": user([[5, 6]], [2])})
    first = fb.tasks.leaf(folder)
    assert "preparing leaf, once" in capsys.readouterr().err
    monkeypatch.setattr(leaf, "read_split", None)
    again = fb.tasks.leaf(folder)
    assert capsys.readouterr().err == ""
    assert [[part.tolist() for part in client] for client in again.clients] == [
        [part.tolist() for part in client] for client in first.clients
    ]
    monkeypatch.undo()
    (tmp_path / "set" / "train" / "file.json").write_text(
        "\ufeff" + json.dumps({"users": ["eve"], "num_samples": [2], "user_data": {"eve": user(y=[1, 0])}}), encoding="utf-8"
    )
    assert [y.tolist() for _, y in fb.tasks.leaf(folder).clients] == [[1, 0]]


def test_a_user_of_leaf_is_in_one_file(tmp_path):
    folder = write_leaf(tmp_path, a={"ann": user(), "bob": user()}, b={"ann": user()})
    assert f"{tmp_path}/train/b.json: user 'ann' is listed in a.json already" in refusal(lambda: fb.tasks.leaf(folder))


@pytest.mark.parametrize("users", [{}, {"ann": user([], [])}])
def test_a_folder_of_leaf_without_examples_is_named(tmp_path, users):
    said = refusal(lambda: fb.tasks.leaf(write_leaf(tmp_path, file=users)))
    assert said == f"{tmp_path}/train: expected users with examples, found none in file.json"


@pytest.mark.parametrize("loss", [None, torch.nn.functional.cross_entropy, torch.nn.CrossEntropyLoss()])
def test_of_one_class_everything_is_right(tmp_path, loss):
    task = fb.tasks.leaf(write_leaf(tmp_path, file={"ann": user([[1, 2], [3, 4], [-1, -5]], [0, 0, 0])}))
    task = task if loss is None else dataclasses.replace(task, loss=loss)
    flat, weights = initial_weights(task, 0)
    assert evaluate(task, flat, np.ones_like(weights)) == {"test": {"loss": 0.0, "accuracy": 1.0}}


def test_inputs_for_the_test_have_the_shape_of_those_for_training(tmp_path):
    folder = write_leaf(tmp_path, file={"ann": user()})
    (tmp_path / "test" / "file.json").write_text(json.dumps({"users": ["ann"], "user_data": {"ann": user([[1]], [0])}}))
    assert f"{tmp_path}/test/file.json: user 'ann': expected inputs of shape (2,) as in" in refusal(
        lambda: fb.tasks.leaf(folder)
    )


# ── partitions ───────────────────────────────────────────────────────────────────────────────────────────────────────


def one_by_one(alpha: float, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[list[int]]:
    """The Dirichlet partition as it is described: every example is drawn on its own, from what is left."""
    classes, inverse = np.unique(labels, return_inverse=True)
    left = [rng.permutation(np.flatnonzero(inverse == c)).tolist() for c in range(len(classes))]
    sizes = np.full(clients, len(labels) // clients)
    sizes[: len(labels) % clients] += 1
    parts = []
    for size in sizes[rng.permutation(clients)]:
        mix, part = rng.dirichlet(alpha * len(classes) * np.bincount(inverse) / len(labels)), []
        for _ in range(size):
            counts = np.array([len(pool) for pool in left])
            possible = np.where(counts > 0, mix, 0.0)
            possible = possible if possible.sum() > 0 else counts.astype(float)
            part.append(left[rng.choice(len(mix), p=possible / possible.sum())].pop())
        parts.append(sorted(part))
    return parts


@given(st.integers(1, 40), st.integers(1, 8), st.sampled_from([0.001, 0.1, 10.0]), st.integers(0, 999))
def test_dirichlet_draws_as_if_one_by_one(clients, classes, alpha, seed):
    labels = np.random.default_rng(seed).integers(0, classes, 120)
    fast = fb.dirichlet(alpha)(labels, clients, np.random.default_rng(seed))
    assert [part.tolist() for part in fast] == one_by_one(alpha, labels, clients, np.random.default_rng(seed))


def test_hsus_alpha_is_worth_a_tenth_for_ten_classes():
    labels = np.repeat(np.arange(10), 50)
    a, b = (split(labels, 40, np.random.default_rng(0)) for split in (fb.dirichlet(1.0, prior=True), fb.dirichlet(0.1)))
    assert all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))
    c = fb.dirichlet(0.1, prior=True)(labels, 40, np.random.default_rng(0))
    assert np.mean([len(set(labels[p])) for p in c]) < np.mean([len(set(labels[p])) for p in b])


# ── from the command line ────────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = """
[task.cifar10]
clients = 6
model.cnn.channels = 8

[algorithm.fedbuff]
concurrency = 3
buffer_size = 2

[client]
lr = 0.1

[until]
trips = 12
"""


def test_a_run_finds_its_data_but_does_not_remember_where(tmp_path, fedbuff):
    for place in ("here", "there"):
        write_cifar(tmp_path / place)
    (tmp_path / "s.toml").write_text(SETTINGS)
    fedbuff("run", "s.toml", "--data", "here", "--out", "run", "--quiet")
    assert "here" not in (tmp_path / "run" / "settings.toml").read_text()
    done = fedbuff("run", "--resume", "--out", "run", "--quiet", "--json", "--data", "there")
    assert '"task": "cifar10 (subset: 60 + 12 images)"' in done.stdout
    fedbuff("run", "s.toml", "--out", "other", "--quiet", env={**os.environ, "FEDBUFF_DATA": str(tmp_path / "there")})
    for name in ("settings.toml", "weights.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    fedbuff("compare", "s.toml", "--algorithms", "fedbuff,fedavg", "--data", "here", "--quiet")


def test_a_folder_named_in_a_settings_file_is_relative_to_it(tmp_path, fedbuff):
    write_cifar(tmp_path / "deep" / "data")
    (tmp_path / "deep" / "s.toml").write_text(SETTINGS.replace("clients = 6", 'clients = 6\ndata = "data"'))
    fedbuff("run", "deep/s.toml", "--out", "run", "--quiet")
    kept = tomllib.loads((tmp_path / "run" / "settings.toml").read_text())["task"]["cifar10"]["data"]
    assert kept == str(tmp_path / "deep" / "data")


def test_what_is_wrong_with_data_is_one_line_and_exit_code_2(tmp_path, fedbuff):
    batches = write_cifar(tmp_path / "data")
    (tmp_path / "s.toml").write_text(SETTINGS)
    said = fedbuff("run", "s.toml", "--data", "nowhere", code=2).stderr
    assert said == "fedbuff: --data nowhere: no such folder; it should hold datasets as docs/datasets.md says\n"
    said = fedbuff("run", "s.toml", code=2).stderr
    assert (
        said.startswith("fedbuff: task.cifar10: data: no folder is given; put cifar-10-python.tar.gz") and said.count("\n") == 1
    )
    (batches / "data_batch_2").write_bytes((batches / "data_batch_2").read_bytes()[:1000])
    said = fedbuff("run", "s.toml", "--data", "data", code=2).stderr.splitlines()[-1]
    assert said.startswith("fedbuff: task.cifar10: ") and "data_batch_2: not a whole pickle of CIFAR-10" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("make", ["cifar10", "celeba", "sent140"])
def test_the_data_of_a_task_is_not_among_its_settings_unless_given(make, tmp_path, monkeypatch):
    write_cifar(tmp_path)
    write_celeba(tmp_path, dict.fromkeys(range(4), 5))
    write_sent140(tmp_path, many(9))
    monkeypatch.setenv("FEDBUFF_DATA", str(tmp_path))
    arguments = {"clients": 6} if make == "cifar10" else {}
    assert "data" not in getattr(fb.tasks, make)(**arguments).settings[make]
    assert getattr(fb.tasks, make)(str(tmp_path), **arguments).settings[make]["data"] == str(tmp_path)


def test_workers_share_mapped_clients(tmp_path):
    """Several processes give the weights of one, on clients that are rows of a file."""
    write_sent140(tmp_path, many(30))
    task = fb.tasks.sent140(str(tmp_path), model=fb.models.lstm(hidden=8, width=4))
    server = fb.Server(start=fb.refill(6), buffer_size=3)
    a, b = (fb.simulate(server, task, client=SGD, until=fb.trips(60), workers=n) for n in (1, 2))
    assert all(np.array_equal(a.weights[name], b.weights[name]) for name in a.weights)
    assert len(list(itertools.islice(a.metrics, 2))) == 2


def test_a_file_in_the_place_of_a_prepared_set_is_removed(tmp_path):
    path, calls = tmp_path / "source", []
    path.write_bytes(b"abc")
    counted(path, calls)
    (folder,) = caches()
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    counted(path, calls)
    assert len(calls) == 2 and folder.is_dir()


def test_a_folder_in_the_place_of_a_file_is_said_to_be_one(tmp_path):
    path = write_celeba(tmp_path, {1: 5}) / celeba.IDENTITIES
    path.unlink()
    path.mkdir()
    assert f"{path}: a folder, where a file should be; get it from" in refusal(lambda: fb.tasks.celeba(str(tmp_path)))
