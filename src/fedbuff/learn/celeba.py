"""CelebA: img_align_celeba.zip, identity_CelebA.txt (image, celebrity) and list_attr_celeba.txt (image, forty times ±1)."""

import io
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.learn.cache import New
from fedbuff.learn.folder import one_line

VERSION = 2  # of what `prepare` makes
SOURCE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
ARCHIVE, IDENTITIES, ATTRIBUTES = "img_align_celeba.zip", "identity_CelebA.txt", "list_attr_celeba.txt"
SIDE = 32
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
IMAGES = 202_599  # in the whole set

_LARGEST = 1 << 24  # bytes of a JPEG; the originals have some 10 kB
_MOST_PIXELS = 1 << 24
_SIGNS = frozenset({"1", "-1"})


def prepare(sources: Sequence[Path], new: New) -> None:
    """x, y (1 if smiling) and owners, celebrity by celebrity."""
    archive, identities, attributes = sources
    celebrity, smiling = read_identities(identities), read_attribute(attributes)
    images = sorted(list_images(archive, celebrity, smiling), key=lambda image: celebrity[image])
    new("owners", (len(images),), np.int64)[:] = [celebrity[image] for image in images]
    new("y", (len(images),), np.int64)[:] = [smiling[image] for image in images]
    read_images(archive, images, new("x", (len(images), 3, SIDE, SIDE), np.uint8))


def read_identities(path: Path) -> dict[str, int]:
    """The celebrity on each image, by the image's name."""
    found: dict[str, int] = {}
    for number, line in _lines(path):
        match line.split():
            case [image, celebrity] if celebrity.isascii() and celebrity.isdigit() and len(celebrity) < 10:
                if image in found:
                    raise ValueError(f"{path}: line {number}: {image} is listed twice")
                found[image] = int(celebrity)
            case _:
                raise ValueError(f"{path}: line {number}: expected an image and the number of a celebrity, found {line[:40]!r}")
    if not found:
        raise ValueError(f"{path}: lists no images; get it from {SOURCE}")
    return found


def read_attribute(path: Path, attribute: str = "Smiling") -> dict[str, bool]:
    """Whether each image has the attribute, by the image's name."""
    lines = _lines(path)
    (_, count), (_, header) = next(lines, (1, "")), next(lines, (2, ""))
    names = header.split()
    if not count.strip().isdecimal() or len(count.strip()) > 9 or attribute not in names:
        raise ValueError(
            f"{path}: expected the number of images and the names of attributes with {attribute} among them, "
            f"found {count[:20]!r} and {header[:40]!r}"
        )
    column = 1 + names.index(attribute)
    found: dict[str, bool] = {}
    for number, line in lines:
        values = line.split()
        if len(values) != 1 + len(names) or not _SIGNS.issuperset(values[1:]):
            raise ValueError(f"{path}: line {number}: expected an image and {len(names)} times 1 or -1, found {line[:40]!r}")
        if values[0] in found:
            raise ValueError(f"{path}: line {number}: {values[0]} is listed twice")
        found[values[0]] = values[column] == "1"
    if len(found) != int(count):
        raise ValueError(f"{path}: says that it lists {int(count):,} images, but lists {len(found):,}; is it cut off?")
    return found


def list_images(path: Path, identities: dict[str, int], attributes: dict[str, bool]) -> list[str]:
    """The names of the images in the archive, sorted; all must be in both lists, which must list the same."""
    if identities.keys() != attributes.keys():
        odd = min(identities.keys() ^ attributes.keys())
        there, absent = (IDENTITIES, ATTRIBUTES) if odd in identities else (ATTRIBUTES, IDENTITIES)
        raise ValueError(f"{odd} is in {there} but not in {absent}: they don't belong together; get both from {SOURCE}")
    with _opened(path) as archive:
        names = sorted(_images(archive))
    if not names:
        raise ValueError(f"{path}: holds no .jpg; get it from {SOURCE}")
    for name in names:
        if name not in identities:
            raise ValueError(
                f"{path}: {one_line(name)} is in neither {IDENTITIES} nor {ATTRIBUTES}; get all three from {SOURCE}"
            )
    return names


def read_images(path: Path, names: Sequence[str], out: NDArray[np.uint8]) -> None:
    """Decode the named images of the archive into `out`, [image, 3, SIDE, SIDE]; its folders don't matter."""
    try:
        import PIL  # noqa: F401
    except ImportError as e:
        raise ValueError("CelebA's images are decoded by Pillow: pip install 'fedbuff[data]'") from e
    with _opened(path) as archive:
        members = _images(archive)
        for i, name in enumerate(names):
            try:
                if members[name].file_size > _LARGEST:
                    raise ValueError(f"{members[name].file_size:,} bytes are too many")
                out[i] = decode(archive.read(members[name]))
            except Exception as e:  # a damaged archive or image can raise nearly anything, a wrong checksum among it
                raise ValueError(f"{path}: {name} can't be read ({one_line(e)}); get it again from {SOURCE}") from e


def decode(jpeg: bytes) -> NDArray[np.uint8]:
    """An image as [3, SIDE, SIDE]: its shorter side is made SIDE long, then the middle is cut out, as torchvision does."""
    from PIL import Image, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(jpeg), formats=("JPEG",))
    except UnidentifiedImageError as e:  # which names the bytes by their address
        raise ValueError("cannot identify image as a JPEG") from e
    with opened as image:
        width, height = image.size
        if width * height > _MOST_PIXELS:
            raise ValueError(f"{width} × {height} pixels are too many")
        pixels = image.convert("RGB")
    short = min(width, height)
    width, height = int(SIDE * width / short), int(SIDE * height / short)
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - SIDE) / 2), round((height - SIDE) / 2)
    return np.asarray(pixels)[top : top + SIDE, left : left + SIDE].transpose(2, 0, 1)


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except Exception as e:  # the list of contents is damaged, or it is not a ZIP file at all
        raise ValueError(f"{path}: not a whole ZIP file ({one_line(e)}); get it again from {SOURCE}") from e


def _images(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The images by name, without their folders; macOS adds a file ._NAME to each, which is none."""
    files = [(info.filename.rpartition("/")[2], info) for info in archive.infolist()]
    images = [(name, info) for name, info in files if name.lower().endswith(".jpg") and not name.startswith("._")]
    found = dict(images)
    if len(found) < len(images):
        twice, _ = Counter(name for name, _ in images).most_common(1)[0]
        raise ValueError(f"{archive.filename}: holds {one_line(twice)} twice; get it again from {SOURCE}")
    return found


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The lines that are not empty, with their numbers."""
    try:
        with path.open(encoding="utf-8-sig") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    yield number, line.rstrip("\n")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not a text file: {e}") from e
